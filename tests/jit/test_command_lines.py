# SPDX-License-Identifier: Apache-2.0
"""Contents of ``build.ninja``: flags, their variables, units, job counts."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashinfer.jit import build_jit_specs, core, cpp_ext, gen_jit_spec, toolchain
from flashinfer.jit.attention import gen_single_decode_module
from flashinfer.jit.context import current_compilation_context
from flashinfer.jit.norm import gen_norm_module

from .toolbox import TINY


def commands(spec) -> SimpleNamespace:
    """Return the words of the compile and link commands, by tool."""
    found = SimpleNamespace(cuda=[], host=[], link=[])
    for line in cpp_ext.ninja_text(spec, spec.build_dir).splitlines():
        key, _, value = line.strip().partition(" = ")
        if key == "compiler":
            (found.host if " -x c++ " in value else found.cuda).extend(shlex.split(value))
        elif key == "command" and "-shared" in value:
            found.link.extend(shlex.split(value))
    return found


@pytest.fixture
def op(workshop, toolkit):
    """Return a function that describes a CUDA module with a device and a host source in the current environment."""
    device, host = workshop.source("op", ".cu"), workshop.source("binding", ".cpp", "int x;\n")
    return lambda **more: gen_jit_spec("op", [device, host], **more)


def test_defaults(op, toolkit):
    found = commands(op())
    assert found.cuda[0] == str(toolkit / "bin" / "nvcc")
    for flags in (found.cuda, found.host):
        assert {"-std=c++17", "-O3", "-DNDEBUG"} <= set(flags)
        assert "-g" not in flags
    defines = {f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")}
    assert defines | {"-gencode=arch=compute_90a,code=sm_90a", "--threads=1"} <= set(found.cuda)
    assert {"-Wl,-z,defs", "-l:libcudart.so.13", f"-L{toolkit}/lib64", f"-L{toolkit}/lib64/stubs"} <= set(found.link)
    assert f"-isystem{toolkit}/include" in found.host
    assert "-use_fast_math" not in commands(gen_norm_module("cuda")).cuda  # it flushes subnormals


def test_toolkit_of_the_distribution(op, monkeypatch):
    """Check that ``-isystem /usr/include`` is absent, as it breaks ``#include <cstdlib>``; manifest flags do not
    change.
    """
    before = cpp_ext.module_flags(op())
    monkeypatch.setattr(cpp_ext, "get_cuda_path", lambda: "/usr")
    found = commands(op())
    assert "-isystem/usr/include" not in found.host
    assert "-L/usr/lib64" in found.link
    assert cpp_ext.module_flags(op()) == before


def test_debug(op, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    found = commands(op())
    assert {"-O0", "-g", "--device-debug", "-lineinfo"} <= set(found.cuda)
    assert "-G" not in found.cuda  # compiler caches do not support -G
    assert {"-O0", "-g"} <= set(found.host)
    assert not {"-O3", "-DNDEBUG"} & {*found.cuda, *found.host}


def test_lineinfo(op, monkeypatch):
    assert "-lineinfo" not in commands(op()).cuda
    monkeypatch.setenv("FLASHINFER_JIT_LINEINFO", "1")
    assert commands(op()).cuda.count("-lineinfo") == 1
    assert "-O3" in commands(op()).cuda


def test_nvcc_threads(op, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NVCC_THREADS", "4")
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", "env")
    assert cpp_ext.get_nvcc_parallelism_flags() == ["--threads=4"]
    assert "--threads=4" in commands(op()).cuda
    for bad in ("0", "many"):
        monkeypatch.setenv("FLASHINFER_NVCC_THREADS", bad)
        with pytest.raises(ValueError, match="FLASHINFER_NVCC_THREADS must be a whole number from 1 on"):
            op()


def test_launchers(op, toolkit, workshop, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", "ccache --fast")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "sccache")
    found = commands(op())
    assert found.cuda[:3] == ["ccache", "--fast", str(toolkit / "bin" / "nvcc")]
    assert found.host[:2] == ["sccache", str(workshop.cxx)]
    assert found.link[found.link.index("sccache") + 1] == str(workshop.cxx)


def test_extra_flags_reach_their_lines_last(op, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O1 -DTEXT='a b'")
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-O2")
    monkeypatch.setenv("FLASHINFER_EXTRA_LDFLAGS", "-lm")
    found = commands(op(extra_cflags=["-DH"], extra_cuda_cflags=["-DC"], extra_ldflags=["-lL"]))
    assert found.host[-3:] == ["-DH", "-O1", "-DTEXT=a b"]
    assert found.cuda[-2:] == ["-DC", "-O2"]
    assert found.link[found.link.index("-lL") + 1] == "-lm"


def test_broken_quoting_is_split_at_blanks(op, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-DA='x -DB")
    with pytest.warns(UserWarning, match="splitting at white space"):
        assert commands(op()).host[-2:] == ["-DA='x", "-DB"]


def test_extra_flags_with_shell_characters_survive_the_build(workshop, monkeypatch):
    """Check flags that pass through ninja ($) and the shell (quotes) to the compiler."""
    workshop.set_answer("sizeof(TEXT)")
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", """'-DTEXT="a $b & c"'""")
    assert workshop.spec().build_and_load().answer() == len("a $b & c") + 1


def test_compiler_of_nvcc(op, monkeypatch):
    monkeypatch.setenv("CC", "/opt/gcc")
    found = commands(op())
    assert found.cuda[found.cuda.index("-ccbin") + 1] == "/opt/gcc"
    assert "-ccbin" not in found.host


def test_compiler_of_nvcc_in_several_words(op, workshop, monkeypatch):
    """Check that CC is split into words like CXX; nvcc would look for a program with the whole text as name."""
    monkeypatch.setenv("CC", f"env {workshop.cxx} -m64")
    found = " ".join(commands(op()).cuda)
    assert f" -ccbin {workshop.cxx} -Xcompiler -m64 " in found


def test_standard_of_the_module_wins(op):
    found = commands(op(extra_cflags=["-std=c++20"], extra_cuda_cflags=["-std=c++20"]))
    for flags in (found.host, found.cuda):
        assert [f for f in flags if f.startswith("-std")] == ["-std=c++20"]


def test_targets(op, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a 8.0")

    def targets(spec):
        return [word.rpartition("sm_")[2] for word in commands(spec).cuda if "gencode" in word]

    assert targets(op()) == ["80", "90a"]
    assert targets(op(extra_cuda_cflags=["-gencode=arch=compute_100a,code=sm_100a"])) == ["100a"]
    own = current_compilation_context.get_nvcc_flags_list(supported_major_versions=[9, 10])
    assert targets(op(extra_cuda_cflags=own)) == ["90a"]
    assert targets(op(supported_major_versions=[8])) == ["80"]


def test_device_linking_goes_through_nvcc_for_the_same_targets(op, toolkit, workshop):
    link = commands(op(needs_device_linking=True)).link
    assert str(toolkit / "bin" / "nvcc") in link
    assert link[link.index("-ccbin") + 1] == str(workshop.cxx)
    assert "-gencode=arch=compute_90a,code=sm_90a" in link
    assert not [word for word in link if word.startswith("-Wl,")]


# ------------------------------------------------------------------------------------------------ units


def units(spec) -> dict:
    return {u.source.name: u for u in cpp_ext.translation_units(spec)}


def test_included_source_is_not_a_unit(workshop, toolkit):
    launcher, binding = workshop.source("op", ".cu"), workshop.source("op_jit_binding", ".cu", '#include "op.cu"\n')
    spec = gen_jit_spec("op", [launcher, binding])
    assert list(units(spec)) == ["op_jit_binding.cu"]
    assert spec.build_and_load().answer() == 42
    launcher.write_text(TINY.replace("= ANSWER", "= 1"))
    assert spec.build_and_load().answer() == 1  # still a dependency


def test_files_of_one_name_have_objects_of_their_own(workshop, tmp_path):
    """Check equal file names: in folders of equal name, and in one folder with different suffixes."""
    first = workshop.source("op")
    others = [tmp_path / "more" / first.parent.name / first.name, first.with_suffix(".cc")]
    for number, path in enumerate(others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"int other_{number}() {{ return {number}; }}")
    spec = gen_jit_spec("op", [first, *others], backend="cpu")
    assert [path.name for path in spec.get_object_paths()] == ["src_op.o", "src_op_2.o", "src_op_3.o"]
    assert spec.build_and_load().answer() == 42


@pytest.mark.parametrize(
    "text, expected",
    [
        ("int x;", False),
        ("void f(TensorView x);", True),
        ("void f() { TVM_FFI_THROW(ValueError); }", True),
        ('#include "tvm_ffi_utils.h"\nvoid f(TensorView x);', False),
        ('#include "other.cuh"\n#include "tvm_ffi_utils.h"\nvoid f(TensorView x);', True),
    ],
)
def test_who_gets_the_helper_header(workshop, toolkit, text, expected):
    spec = gen_jit_spec("op", [workshop.source("op", ".cu", text)])
    assert units(spec)["op.cu"].needs_helper is expected
    assert ("-include" in commands(spec).cuda) is expected


def test_host_sources_go_to_the_host_compiler(workshop, toolkit):
    source = workshop.source("op", ".cu")
    spec = gen_jit_spec("op", [source], host_sources=frozenset([source]))
    assert units(spec)["op.cu"].tool == "cxx"
    assert spec.get_object_paths()[0].name == "src_op.cuda.o"
    assert spec.build_and_load().answer() == 42


def test_sources_without_kernels_are_optimised_less(workshop, toolkit, monkeypatch):
    """Compile launchers with -O2, kernels with -O3; the flags of the user come last."""
    source, binding = workshop.source("op", ".cu"), workshop.source("binding", ".cpp", "int x;\n")

    def levels() -> list[list[str]]:
        spec = gen_jit_spec("op", [source, binding], host_sources=frozenset([source]))
        lines = [cpp_ext.Commands(spec).compile(unit) for unit in cpp_ext.translation_units(spec)]
        return [[word for word in shlex.split(line) if word.startswith("-O")] for line in lines]

    assert levels() == [["-O2"], ["-O3"]]
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O1")
    assert levels() == [["-O2", "-O1"], ["-O3", "-O1"]]
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    assert levels() == [["-O0", "-O1"], ["-O0", "-O1"]]


def test_modules_of_one_stem(toolkit):
    """Check that launcher and binding are one unit, and which have no kernels: those of CUDA and of attention."""
    for backend, has_kernels in (("cpu", True), ("cuda", False)):
        first, *_ = cpp_ext.translation_units(gen_norm_module(backend))
        assert (first.source.name, first.tool, first.has_kernels) == ("norm_jit_binding.cu", "cxx", has_kernels)
    assert len(cpp_ext.translation_units(gen_norm_module("cpu"))) == 1
    types = (torch.float16, torch.float16, torch.float16)
    decode = gen_single_decode_module(*types, 64, 64, 0, False, False, device="cpu")
    assert {unit.source.name: unit.has_kernels for unit in cpp_ext.translation_units(decode)} == {
        "single_decode_jit_binding.cu": False,
        "single_decode_cpu.cpp": True,
    }


# ------------------------------------------------------------------------------------------------ jobs


@pytest.mark.parametrize("jobs", ["1", "7"])
def test_max_jobs(workshop, monkeypatch, jobs):
    seen = []
    real = cpp_ext.subprocess.Popen
    monkeypatch.setattr(
        cpp_ext.subprocess, "Popen", lambda command, **more: seen.append(command) or real(command, **more)
    )
    monkeypatch.setenv("MAX_JOBS", jobs)
    workshop.spec().build()
    assert seen[0][seen[0].index("-j") + 1] == jobs


@pytest.mark.parametrize(
    "cores, gigabytes, jobs",
    [(16, 256, 16), (16, 6, 4), (16, 0.2, 1), (1, 256, 1)],
    ids=["cores", "memory", "little memory", "one core"],
)
def test_jobs_are_bounded_by_cores_and_memory(monkeypatch, cores, gigabytes, jobs):
    monkeypatch.setattr(toolchain.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(toolchain, "_available_bytes", lambda: int(gigabytes * 2**30))
    assert toolchain.job_count() == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "all"])
def test_bad_max_jobs_is_an_error(monkeypatch, jobs):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(ValueError, match="MAX_JOBS must be a whole number from 1 on"):
        toolchain.job_count()


def test_ninja_by_hand(workshop, toolkit, capfd):
    """Check the published functions for programs that write and run the ninja file themselves."""
    source = workshop.source("op", ".cu")
    described = gen_jit_spec("op", [source], extra_cuda_cflags=["-DX"])
    missing = cpp_ext.generate_ninja_build_for_op("op", [source.with_name("no.cu")], None, None, None, None)
    assert "no.cu" in missing
    text = cpp_ext.generate_ninja_build_for_op("op", [source], None, ["-DX"], None, None)
    assert " --generate-dependencies-with-compile -MF $out.d " in text and "--dependency-output" not in text
    file = described.build_dir / "build.ninja"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    cpp_ext.run_ninja(file.parent, file, verbose=False)
    assert described.load().answer() == 42
    assert "-DX" not in capfd.readouterr().out
    source.write_text("#error broken on purpose\n")
    with pytest.raises(RuntimeError, match=r"Ninja build failed\. .*\n(.*\n)*.*broken on purpose"):
        cpp_ext.run_ninja(file.parent, file, verbose=False)


@pytest.mark.parametrize("given, variable, words", [(3, "5", ["-j", "3"]), (None, "5", ["-j", "5"]), (None, "", [])])
def test_command_of_ninja(tmp_path, monkeypatch, given, variable, words):
    seen = []
    run = subprocess.run
    monkeypatch.setenv("MAX_JOBS", variable)
    monkeypatch.setattr(cpp_ext.subprocess, "run", lambda cmd, **kw: (seen.append(cmd), run(["true"], check=False))[1])
    (tmp_path / "link").symlink_to(tmp_path)
    cpp_ext.run_ninja(tmp_path / "link", tmp_path / "link" / "build.ninja", False, given)
    assert seen == [["ninja", "-v", "-C", str(tmp_path), "-f", str(tmp_path / "build.ninja"), *words]]


def test_jobs_of_a_group(monkeypatch, toolkit, workshop):
    """Check that many modules have a number of jobs of their own, and one module has not."""
    seen = []
    real = subprocess.Popen
    monkeypatch.setattr(cpp_ext.subprocess, "Popen", lambda cmd, **kw: (seen.append(cmd), real(cmd, **kw))[1])
    monkeypatch.setenv("FLASHINFER_JIT_PREBUILD_MAX_JOBS", "7")
    monkeypatch.setenv("MAX_JOBS", "2")
    build_jit_specs([workshop.spec("a"), workshop.spec("b")])
    workshop.spec("c").build()
    assert [cmd[cmd.index("-j") + 1] for cmd in seen if "-j" in cmd] == ["7", "2"]


def test_flags_of_published_modules(toolkit, monkeypatch):
    """Check that sources may be absent, and the flags that programs find on the spec."""
    spec = gen_jit_spec("op", [])
    assert {"-std=c++17", "-Wno-switch-bool", "-DNDEBUG"} <= set(spec.extra_cflags)
    enabled = {f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")}
    wanted = {"-std=c++17", "--threads=1", "-use_fast_math", "-Xfatbin=-compress-all", "--compress-mode=size"}
    assert wanted | enabled | {"-DNDEBUG"} <= set(spec.extra_cuda_cflags)
    assert "-use_fast_math" not in gen_jit_spec("op", [], use_fast_math=False).extra_cuda_cflags
    assert "-std=c++17" not in gen_jit_spec("op", [], ["-std=c++20"]).extra_cflags
    for name in ("DEBUG", "VERBOSE"):
        monkeypatch.setenv(f"FLASHINFER_JIT_{name}", "1")
        spec = gen_jit_spec("op", [])
        assert {"-O0", "-g"} <= set(spec.extra_cflags) and "-DNDEBUG" not in spec.extra_cflags
        assert {"-g", "-O0", "--device-debug"} <= set(spec.extra_cuda_cflags)
        assert not {"-G", "-DNDEBUG", "-O3"} & set(spec.extra_cuda_cflags)
        monkeypatch.delenv("FLASHINFER_JIT_DEBUG", raising=False)
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "0")
    assert "-DNDEBUG" in gen_jit_spec("op", []).extra_cflags


def test_flags_of_single_sources(workshop, toolkit):
    sources = [workshop.source(name, ".cu") for name in ("one", "two")]
    spec = gen_jit_spec("op", sources, None, ["-DALL"], extra_cuda_cflags_by_source={sources[0]: ["-DONE"]})
    one, two = (shlex.split(entry["command"]) for entry in spec.get_compile_commands())
    assert "-DONE" in one and not {"-DALL", "-use_fast_math"} & set(one) and "-DNDEBUG" in one
    assert {"-DALL", "-use_fast_math"} <= set(two) and "-DONE" not in two
    for words in (one, two):
        assert all(words.count(flag) == 1 for flag in ("-std=c++17", "-O3", "-DNDEBUG", "--threads=1"))


def test_adapters_and_embedded_files(workshop, tmp_path):
    """Check that a library holds the bytes of a file, and that what wraps the loaded module is returned."""

    def write(folder):
        (folder / "data.bin").write_bytes(b"four")
        return {"blob": folder / "data.bin"}

    workshop.set_answer("int(blob_end - blob)")
    source = workshop.source("tiny", text=f'extern "C" const char blob[], blob_end[];\n{TINY}')
    spec = gen_jit_spec(
        "tiny", [source], backend="cpu", embedded_cubin_factory=write, post_load_adapter=lambda module: [module]
    )
    (module,) = spec.build_and_load()
    assert module.answer() == 4


def test_a_program_may_build_in_its_own_way(workshop, toolkit, monkeypatch):
    spec = gen_jit_spec("op", [workshop.source("op", ".cu")])
    ran = []
    monkeypatch.setattr(core, "run_ninja", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(core, "get_nvcc_parallelism_flags", lambda: ["--threads=9"])
    spec.build(verbose=False, need_lock=False)
    assert ran == [(spec.build_dir, spec.ninja_path, False)] and spec.is_ninja_generated
    assert "--threads=9" in gen_jit_spec("op", []).extra_cuda_cflags
    monkeypatch.setattr(core, "check_cuda_arch", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gen_jit_spec("op", [])


def test_generated_sources_are_on_disk_after_write_ninja(workshop):
    """Check that ninja alone builds after write_ninja: the guide's way to look at a build."""
    path = workshop.src / "made.cpp"
    text = workshop.source("tiny").read_text()
    spec = gen_jit_spec("made", [path], backend="cpu", generated={path: text}, extra_include_paths=[workshop.src])
    spec.write_ninja()
    assert path.read_text() == text
    subprocess.run([toolchain.find_ninja(), "-C", str(spec.build_dir)], check=True, capture_output=True)
    assert spec.jit_library_path.exists()


def test_minor_versions_may_be_numbers(monkeypatch, toolkit):
    monkeypatch.setattr(current_compilation_context, "_known", None)
    current_compilation_context.TARGET_CUDA_ARCHS = {(8, 6)}
    core.check_cuda_arch()
    assert current_compilation_context.get_nvcc_flags_list()[0] == "-gencode=arch=compute_86,code=sm_86"
    core.refresh_current_compilation_context()
    assert {(9, "0a")} == current_compilation_context.TARGET_CUDA_ARCHS


def test_pieces_of_the_flags(toolkit):
    common = cpp_ext.build_common_cflags("/cuda", ["/mine"])
    assert {"-I/mine", "/cuda/include"} <= set(common)
    assert cpp_ext.build_cflags(common, ["-DH"])[-1] == "-DH"
    assert "-gencode=arch=compute_90a,code=sm_90a" in cpp_ext.build_cuda_cflags(common, ["-DC"])
    assert isinstance(cpp_ext.host_compiler_is_gcc(), bool)
    assert core.get_tmpdir().is_dir()
    core.FlashInferJITLogger().info_once("%s", "said")


def test_words_of_a_variable(monkeypatch, capfd):
    monkeypatch.setenv("OWN_FLAGS", "-DA='x y' -DB")
    assert cpp_ext.parse_env_flags("OWN_FLAGS") == ["-DA=x y", "-DB"]
    assert cpp_ext.parse_env_flags("OWN_FLAGS_THAT_NOBODY_SET") == []
    monkeypatch.setenv("OWN_FLAGS", "-DA='x -DB")
    assert cpp_ext.parse_env_flags("OWN_FLAGS") == ["-DA='x", "-DB"]
    assert "OWN_FLAGS: No closing quotation" in capfd.readouterr().err


def test_folders_of_headers(tmp_path, monkeypatch):
    (tmp_path / "include/cccl").mkdir(parents=True)
    monkeypatch.setattr(cpp_ext, "get_cuda_path", lambda: str(tmp_path))
    cccl = str(tmp_path / "include/cccl")
    assert cpp_ext.get_cccl_includes() == [cccl]
    system = cpp_ext.get_system_includes(str(tmp_path))
    assert system[-2:] == [str(tmp_path / "include"), cccl] and (Path(system[0]) / "tvm").is_dir()
    assert cpp_ext.build_common_cflags(str(tmp_path))[-1] == cccl
    (tmp_path / "include/cccl").rmdir()
    assert cpp_ext.get_cccl_includes() == [] and cccl not in cpp_ext.get_system_includes(str(tmp_path))


def test_values_of_several_lines(tmp_path):
    """Check that ninja reads the value of several lines as one."""
    (tmp_path / "build.ninja").write_text(
        f"words = {cpp_ext.join_multiline(['a', 'b', 'c'])}\n"
        "rule r\n  command = echo $words > $out\nbuild out: r\ndefault out\n"
    )
    cpp_ext.run_ninja(tmp_path, tmp_path / "build.ninja", False)
    assert (tmp_path / "out").read_text().split() == ["a", "b", "c"]
