# SPDX-License-Identifier: Apache-2.0
"""Modules built ahead of time: which are loaded, which companion packages count, and the build that makes them."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashinfer import aot
from flashinfer.__main__ import main
from flashinfer.jit import build_jit_specs, cpu_targets
from flashinfer.jit import env as jit_env
from flashinfer.jit.prebuilt import _warn_missing, _warn_other, read_index, record_modules

from .toolbox import TINY, calls, in_processes


@pytest.fixture
def prebuilt(workshop, tmp_path, monkeypatch):
    """Pre-build ``op`` with the answer 1, while its source gives 42. No target, no nvcc."""
    op = workshop.spec("op", text=TINY.replace("= ANSWER", "= 1"))
    op.build()
    folder = tmp_path / "aot"
    (folder / "op").mkdir(parents=True)
    shutil.copy(op.jit_library_path, folder / "op" / "op.so")
    shutil.rmtree(workshop.base / ".cache")
    workshop.source("op")
    workshop.log_length = len(workshop.calls)
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_AOT_DIR", folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return folder / "op" / "op.so"


def test_prebuilt_is_preferred(workshop, prebuilt, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    for backend in ("cpu", "cuda"):
        spec = workshop.spec("op", backend)
        assert spec.is_aot
        assert spec.is_compiled
        assert spec.get_library_path() == prebuilt
        assert spec.build_and_load().answer() == 1
    assert len(workshop.calls) == workshop.log_length
    assert list(workshop.base.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 40, 2000, -1])
def test_broken_prebuilt_module_is_built_instead(workshop, prebuilt, caplog, keep):
    """Check truncated libraries: loading one would kill the process (SIGBUS), so the dynamic linker is not called."""
    prebuilt.write_bytes(prebuilt.read_bytes()[:keep])
    assert workshop.spec("op").build_and_load().answer() == 42
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"pre-built {prebuilt} cannot be loaded" in record.getMessage()
    assert len(workshop.calls) == workshop.log_length + 2


def test_prebuilt_module_of_another_machine(workshop, prebuilt, caplog):
    """Check a complete library of another processor: bytes 18 and 19 of an ELF file hold the machine number."""
    content = prebuilt.read_bytes()
    prebuilt.write_bytes(content[:18] + b"\x28\x00" + content[20:])
    assert workshop.spec("op").build_and_load().answer() == 42
    assert "cannot be loaded" in caplog.text


def test_groups_leave_prebuilt_modules_alone(workshop, prebuilt):
    specs = [workshop.spec("op"), workshop.spec("other")]
    build_jit_specs(specs)
    assert len(workshop.calls) == workshop.log_length + 2
    assert not specs[0].jit_library_path.exists()
    build_jit_specs(specs, skip_prebuilt=False)
    assert specs[0].jit_library_path.exists()


# ------------------------------------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    "recorded, machine, fits",
    [
        (["80"], "8.6", True),
        (["86"], "8.0", False),
        (["80", "90a"], "9.0a", True),
        (["80"], "9.0a", False),
        (["100a"], "10.3a", False),
        (["100f"], "10.3a", True),
        (["80"], "8.0 9.0a", False),
        (["80"], "", True),
    ],
)
def test_targets_of_a_prebuilt_module(workshop, prebuilt, monkeypatch, caplog, recorded, machine, fits):
    """Check that code for another GPU is not loaded, where each launch would fail; without a GPU nothing is known."""
    record_modules(prebuilt.parents[1], {"op/op.so": {"targets": recorded}})
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", machine)
    _warn_missing.cache_clear()
    assert workshop.spec("op", "cuda").is_aot is fits
    assert ("compiling instead" in caplog.text) is not fits


def test_target_of_a_module_for_some_majors(workshop, prebuilt, monkeypatch):
    """Check a module for Hopper alone, on a machine that has other GPUs besides."""
    record_modules(prebuilt.parents[1], {"op/op.so": {"targets": ["90a"]}})
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    spec = workshop.spec("op", "cuda")
    assert not spec.is_aot
    assert replace(spec, supported_major_versions=[9]).is_aot


def test_cpu_modules_need_the_instructions(workshop, prebuilt, monkeypatch):
    """Check that the best level of this machine is chosen, and none that it lacks: an illegal instruction kills."""
    root, (low, mid, high) = prebuilt.parents[1], ("x86-64-v2", "x86-64-v3", "x86-64-v4")
    for level in (low, mid, high):
        shutil.copytree(prebuilt.parent, root / f"cpu-{level}" / "op")
    shutil.rmtree(prebuilt.parent)
    monkeypatch.setattr(cpu_targets.platform, "machine", lambda: "x86_64")
    for flags, expected in ((cpu_targets._V3, mid), (cpu_targets.LEVELS["x86_64"][high], high), ("sse2", None)):
        monkeypatch.setattr(cpu_targets, "cpu_flags", lambda flags=flags: frozenset(flags.split()))
        spec = workshop.spec("op")
        assert spec.is_aot is (expected is not None)
        assert expected is None or spec.aot_path == root / f"cpu-{expected}" / "op" / "op.so"


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "modules": {}}', '{"schema": 1, "modules": 3}'])
def test_index_that_cannot_be_read(workshop, prebuilt, caplog, text):
    (prebuilt.parents[1] / "index.json").write_text(text)
    assert workshop.spec("op", "cuda").is_aot
    assert "index.json cannot be read" in caplog.text


# ------------------------------------------------------------------------------------------------ sources


@pytest.fixture
def shipped(workshop, tmp_path, monkeypatch):
    """Pre-build ``tiny`` by AOT for CPUs, with its header among those of the package; return the folder."""
    monkeypatch.setattr(aot, "gen_scale_modules", lambda backend="cuda": [workshop.spec()])
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_INCLUDE_DIR", workshop.src)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    package_for_cpus(tmp_path)
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "out"))
    _warn_other.cache_clear()
    assert workshop.spec().is_aot and workshop.spec().build_and_load().answer() == 42
    return tmp_path / "out"


def package_for_cpus(tmp_path):
    config = {"families": ["scale"], "cpu_targets": ["native"]}
    aot.compile_and_package_modules(tmp_path / "out", tmp_path / "build", config=config)


def test_prebuilt_modules_of_other_sources(workshop, shipped, caplog):
    """Check that a header that changed is a warning and a build: its kernels would give the old numbers."""
    workshop.set_answer(84)
    for _ in range(2):
        assert workshop.spec().build_and_load().answer() == 84
    assert caplog.text.count("was made from another {include}/answer.h: compiling instead") == 1
    workshop.set_answer(42)
    assert workshop.spec().is_aot


def test_prebuilt_modules_of_a_header_that_is_gone(workshop, shipped, caplog):
    (workshop.src / "answer.h").unlink()
    assert not workshop.spec().is_aot and "{include}/answer.h" in caplog.text


def test_prebuilt_modules_without_the_sources(workshop, shipped, monkeypatch, tmp_path):
    """Check an image without sources, which could not build anything: the version alone is compared."""
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_INCLUDE_DIR", tmp_path / "none")
    assert workshop.spec().is_aot


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_prebuilt_modules_of_another_release(workshop, shipped, caplog, monkeypatch, version):
    """Check the version of ``index.json``; releases before 0.6.19 recorded none."""
    path = shipped / "index.json"
    index = json.loads(path.read_text())
    for facts in index["modules"].values():
        facts.pop("version") if version is None else facts.update(version=version)
    path.write_text(json.dumps(index))
    assert not workshop.spec().is_aot
    assert f"are of flashinfer {version or 'an unknown release'}, not of {jit_env.__version__}" in caplog.text
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert workshop.spec().is_aot


def test_packages_made_again(workshop, shipped, tmp_path):
    workshop.set_answer(7)
    package_for_cpus(tmp_path)
    assert workshop.spec().is_aot


def test_two_packages_in_one_folder(tmp_path):
    """Check that no process loses what another records, and that copies have names of their own."""

    def record(i):
        for k in range(20):
            name = f"op{i}_{k}/op.so"
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).touch()
            record_modules(tmp_path, {name: {"targets": []}})

    assert in_processes(3, record) == 3 * [None]
    assert len(read_index(tmp_path)) == 60


def test_a_copy_of_another_process_is_left_alone(workshop, shipped, tmp_path):
    """Check a file by the name that a copy in progress once had: another build may be writing to it."""
    (library,) = shipped.rglob("*.so")
    library.with_suffix(".part").write_text("half of a library")
    package_for_cpus(tmp_path)
    assert library.with_suffix(".part").read_text() == "half of a library"
    assert listing(shipped) == {str(path.relative_to(shipped)) for path in (library, library.with_suffix(".part"))}


# ------------------------------------------------------------------------------------------------ companions

RULES = [
    ("0.6.10", True),
    ("0.6.10+cu130", True),
    ("0.6.1", False),
    ("0.6.100", False),
    ("0.6.10.post1", False),
    ("0.6.9+cu130", False),
]


@pytest.fixture
def companion(tmp_path, monkeypatch):
    """Install a fake companion package of a given version; flashinfer itself is 0.6.10."""
    monkeypatch.setattr(jit_env, "__version__", "0.6.10")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def install(package: str, version: str) -> str:
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True)
        text = f"__version__ = {version!r}\n"
        text += "".join(
            f"def {name}(): return {str(folder / 'data')!r}\n" for name in ("get_jit_cache_dir", "get_cubin_dir")
        )
        (folder / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, package, raising=False)
        importlib.invalidate_caches()
        return str(folder / "data")

    yield install
    for package in ("flashinfer_jit_cache", "flashinfer_cubin"):
        sys.modules.pop(package, None)


def test_modules_of_another_project(workshop, companion, caplog):
    """Check a companion of our version whose modules have the names of ours: only with an index are they ours."""
    data = Path(companion("flashinfer_jit_cache", "0.6.10"))
    spec = workshop.spec("op")
    spec.build()
    (data / "op").mkdir(parents=True)
    shutil.copy(spec.jit_library_path, data / "op" / "op.so")
    assert not spec.is_aot
    assert "have no index.json, so they are not of this package: not loaded" in caplog.text
    record_modules(data, {"op/op.so": {"targets": []}})
    assert spec.is_aot


@pytest.mark.parametrize("version, matches", RULES)
@pytest.mark.parametrize("package, name", [("flashinfer_jit_cache", "AOT"), ("flashinfer_cubin", "CUBIN")])
def test_companion_version(companion, caplog, package, name, version, matches):
    data = companion(package, version)
    matches = matches and not (package == "flashinfer_cubin" and "+" in version)  # binaries have no local version
    for _ in range(2):
        assert (str(getattr(jit_env, f"FLASHINFER_{name}_DIR")) == data) is matches
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == (0 if matches else 1)
    if not matches:
        assert f"{package} {version} is ignored: flashinfer is 0.6.10" in warnings[0]
        assert "FLASHINFER_DISABLE_VERSION_CHECK" in warnings[0] and "flashinfer download-kernels" in warnings[0]


def test_a_folder_beats_the_companion(companion, monkeypatch, caplog, tmp_path):
    companion("flashinfer_cubin", "0.6.10")
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "mine"))
    jit_env._warn_beaten.cache_clear()
    assert tmp_path / "mine" == jit_env.FLASHINFER_CUBIN_DIR
    assert "flashinfer_cubin is installed and not used" in caplog.text


def test_version_check_can_be_disabled(companion, monkeypatch, caplog):
    data = companion("flashinfer_jit_cache", "0.5.0")
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert str(jit_env.FLASHINFER_AOT_DIR) == data
    assert not caplog.records


def test_development_version_takes_any_companion(companion, monkeypatch):
    data = companion("flashinfer_jit_cache", "0.5.0")
    monkeypatch.setattr(jit_env, "__version__", "0.0.0+unknown")
    assert str(jit_env.FLASHINFER_AOT_DIR) == data


def test_show_config_names_what_is_there_and_what_is_used(companion):
    """Check a companion on ``PYTHONPATH``, which has no distribution metadata with a version."""
    companion("flashinfer_jit_cache", "0.6.10+cu130")
    companion("flashinfer_cubin", "0.6.1")
    result = CliRunner().invoke(main, ["show-config", "--json"])
    versions = json.loads(result.stdout)["Versions"]
    assert versions["flashinfer-jit-cache"] == "0.6.10+cu130"
    assert versions["flashinfer-cubin"].startswith("0.6.1 (ignored: flashinfer is ")


def test_probes_for_companions(companion):
    assert not jit_env.has_flashinfer_jit_cache()
    assert not jit_env.has_flashinfer_cubin()
    companion("flashinfer_jit_cache", "0.6.10")
    companion("flashinfer_cubin", "0.6.10")
    assert jit_env.has_flashinfer_jit_cache()
    assert jit_env.has_flashinfer_cubin()


def test_cubin_directory(companion, workshop, monkeypatch, tmp_path):
    assert str(jit_env.FLASHINFER_CUBIN_DIR) == f"{workshop.base}/.cache/flashinfer/cubins"
    companion("flashinfer_cubin", "0.6.10")
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "mine"))
    assert tmp_path / "mine" == jit_env.FLASHINFER_CUBIN_DIR


# ------------------------------------------------------------------------------------------------ building them


@pytest.fixture
def family(workshop, toolkit, monkeypatch):
    """Replace the scale family by two modules that a fake nvcc can compile."""
    specs = lambda backend="cuda": (workshop.spec(name, backend) for name in ("one", "two"))  # noqa: E731
    monkeypatch.setattr(aot, "gen_scale_modules", specs)
    return workshop


def package(tmp_path, **more):
    config = {"families": ["scale"]}
    return aot.compile_and_package_modules(tmp_path / "out", tmp_path / "build", config=config, **more)


def listing(folder) -> set[str]:
    """Return the files of a folder, without the index, which all of them have."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"index.json"}


def test_package(family, tmp_path, toolkit):
    specs = package(tmp_path)
    assert [s.name for s in specs] == ["one", "two"]
    assert listing(tmp_path / "out") == {"one/one.so", "two/two.so"}
    assert list(family.base.iterdir()) == []  # the user's cache is not touched
    assert jit_env.FLASHINFER_JIT_DIR.is_relative_to(family.base)
    assert len(calls(toolkit / "bin" / "nvcc")) == 2
    package(tmp_path)
    assert len(calls(toolkit / "bin" / "nvcc")) == 2


def test_package_is_what_gets_loaded(family, tmp_path, monkeypatch):
    package(tmp_path)
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_AOT_DIR", tmp_path / "out")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert family.spec("one", "cuda").build_and_load().answer() == 42


def test_package_for_cpus(family, tmp_path, monkeypatch):
    """Check several CPU targets in one graph, without a CUDA target, and that the package finds the result."""
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    levels = list(cpu_targets.LEVELS[platform.machine()])
    words = ["--out-dir", str(tmp_path / "out"), "--build-dir", str(tmp_path / "build"), "--family", "scale"]
    aot.main([*words, "--cpu-target", levels[-1], "native"])
    folders = (f"cpu-{levels[-1]}", cpu_targets.cpu_arch_tag())
    assert listing(tmp_path / "out") == {f"{folder}/{name}/{name}.so" for folder in folders for name in ("one", "two")}
    flags = [word for line in family.calls for word in line.split() if word.startswith("-march")]
    assert sorted(flags) == sorted([f"-march={levels[-1]}", "-march=native"] * 2)
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert family.spec("one").build_and_load().answer() == 42
    assert family.spec("one").aot_path == tmp_path / "out" / folders[1] / "one" / "one.so"
    with pytest.raises(SystemExit, match=r"cpu_target must be one of native, .*, got 'pentium'"):
        aot.main([*words, "--cpu-target", "pentium"])


def test_package_without_modules(tmp_path):
    """Check a family that is CUDA only, built for a CPU alone."""
    with pytest.raises(SystemExit, match="families must have modules for the targets, got scale"):
        aot.main(["--build-dir", str(tmp_path / "build"), "--family", "scale", "--cpu-target", "native"])


def test_package_goes_on_where_it_stopped(family, tmp_path, toolkit):
    """Check that a second run compiles only what the first has not finished."""
    family.spec("two", "cuda", text="#error no")
    with pytest.raises(RuntimeError, match="Ninja build failed for two"):
        package(tmp_path)
    family.source("two", ".cu")
    before = len(calls(toolkit / "bin" / "nvcc"))
    package(tmp_path)
    assert len(calls(toolkit / "bin" / "nvcc")) == before + 1


def test_package_from_a_warm_cache(family, tmp_path):
    """Check that a module in the user's cache is still built into the package."""
    family.spec("one", "cuda").build()
    package(tmp_path)
    assert listing(tmp_path / "out") == {"one/one.so", "two/two.so"}


def test_package_with_relative_directories(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = Path(jit_env.FLASHINFER_CSRC_DIR).resolve().parent
    (tmp_path / "tree").symlink_to(tree)
    aot.compile_and_package_modules("out", "build", "tree", config={"families": ["scale"]})
    assert listing(tmp_path / "out") == {"one/one.so", "two/two.so"}


def test_package_of_a_family_that_is_not_there(family, tmp_path):
    with pytest.raises(ValueError, match="family must be one of scale, norm"):
        aot.compile_and_package_modules(tmp_path / "out", tmp_path / "build", config={"families": ["scales"]})


def test_package_skips_what_is_prebuilt(family, tmp_path, monkeypatch):
    package(tmp_path)
    shutil.rmtree(tmp_path / "build")
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_AOT_DIR", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "two")
    aot.compile_and_package_modules(tmp_path / "more", tmp_path / "build", config={"families": ["scale"]})
    assert listing(tmp_path / "more") == {"two/two.so"}
    package(tmp_path, skip_prebuilt=False)
    assert listing(tmp_path / "out") == {"one/one.so", "two/two.so"}


def test_failed_package_leaves_the_directories_as_they_were(family, tmp_path):
    family.spec("two", "cuda", text="#error no")
    with pytest.raises(RuntimeError, match="Ninja build failed for two"):
        package(tmp_path)
    assert jit_env.FLASHINFER_JIT_DIR.is_relative_to(family.base)
    assert "FLASHINFER_GEN_SRC_DIR" not in vars(jit_env)


def test_package_without_an_output_folder(family, tmp_path):
    aot.compile_and_package_modules(None, tmp_path / "build", config={"families": ["scale"]})
    assert (tmp_path / "build" / "cached_ops" / "one" / "one.so").exists()


def test_project_root(family, tmp_path):
    """Check a build from sources of another tree."""
    seen = []

    def scale(backend):
        seen.extend([jit_env.FLASHINFER_CSRC_DIR, jit_env.FLASHINFER_INCLUDE_DIR])
        yield family.spec("one", "cuda")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "gen_scale_modules", scale)
        package(tmp_path, project_root=tmp_path / "tree")
    assert seen == [tmp_path / "tree" / "csrc", tmp_path / "tree" / "include"]
    assert "FLASHINFER_CSRC_DIR" not in vars(jit_env)


def test_targets_must_be_named(family, tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    with pytest.raises(RuntimeError, match="FLASHINFER_CUDA_ARCH_LIST must name"):
        package(tmp_path)
    with pytest.raises(SystemExit, match="FLASHINFER_CUDA_ARCH_LIST must name"):  # a command prints no traceback
        aot.main(["--build-dir", str(tmp_path)])


def test_command_without_a_traceback(family, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    words = ["--build-dir", str(tmp_path / "build"), "--family", "scale"]
    with pytest.raises(SystemExit, match="Not a directory"):
        aot.main([*words, "--out-dir", str(tmp_path / "file" / "out")])
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "ninety")
    with pytest.raises(SystemExit, match=r"target must be .*got 'ninety'"):
        aot.main(words)


def test_command(family, tmp_path, capsys):
    aot.main(["--out-dir", str(tmp_path / "out"), "--build-dir", str(tmp_path / "build"), "--family", "scale"])
    assert "built 2 modules for 9.0a" in capsys.readouterr().out
    assert listing(tmp_path / "out") == {"one/one.so", "two/two.so"}


def test_options_about_attention(monkeypatch):
    """Check that attention options replace the default modules; each combination gives one module of every kind."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    configs = []

    def build(*args, config, **more):
        configs.append(config)
        return []

    monkeypatch.setattr(aot, "compile_and_package_modules", build)
    aot.main([])
    words = (
        "--fa2-head-dim 64,64 192,128 --f16-dtype bfloat16 --f8-dtype float8_e4m3fn --use-logits-soft-cap false true"
    )
    aot.main([*words.split(), "--add-misc", "false", "--add-comm", "true", "--add-moe", "false"])
    assert configs[0] == {"families": list(aot.FAMILIES)}
    assert configs[1]["families"] == ["activation", "comm"]
    names = [spec.name for spec in aot.gen_attention_modules(**configs[1]["attention"])]
    assert len(names) == len(set(names)) == 2 * 2 * 2 * (4 + 2)  # 9.0a adds two modules to each cache
    assert sum("head_dim_qk_192_head_dim_vo_128" in name for name in names) == 24
    assert sum("kv_e4m3" in name for name in names) == 24


def test_published_names_of_parameters():
    assert aot.parse_bool(s="True") is True and aot.parse_head_dim(head_dim="192,128") == (192, 128)


@pytest.mark.parametrize("word", ["--fa2-head-dim=64,a", "--f16-dtype=float17", "--add-act=maybe"])
def test_bad_options(word, capsys):
    with pytest.raises(SystemExit):
        aot.main([word])
    assert word.split("=")[1] in capsys.readouterr().err


def test_families_and_their_generators(toolkit):
    for family in aot.FAMILIES:
        names = [spec.name for spec in getattr(aot, f"gen_{family}_modules")()]
        assert names
        assert len(set(names)) == len(names)
    assert aot.register_default_modules() == len(aot.gen_default_modules())


def test_all_modules_by_published_options(monkeypatch):
    """Check what each option adds, and that modules for absent architectures are left out."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    none = {option: False for option in aot.get_default_config() if option.startswith("add_")}
    attention = ([torch.bfloat16], [], [(128, 128)], [(128, 128)], [False], [False])
    has = aot.detect_sm_capabilities()

    def names(kinds=([],) * 6, capabilities=has, **added) -> set[str]:
        return {spec.name for spec in aot.gen_all_modules(*kinds, capabilities, **{**none, **added})}

    assert names() == set()
    assert names(add_comm=True) >= {"allreduce", "alltoall"} and names(add_act=True) == {"activation"}
    assert {"norm", "rope", "sampling"} <= names(add_misc=True)
    families = [names(**{option: True}) for option in ("add_comm", "add_act", "add_moe", "add_misc")]
    assert sum(map(len, families)) == len(set().union(*families)), "no module belongs to two options"
    rest = set(aot.FAMILIES) - {"decode", "prefill", "mla"}
    assert set().union(*families) == {spec.name for spec in aot.gen_default_modules(rest)}
    with_hopper, without = names(attention), names(attention, {"sm80": True})
    assert without < with_hopper and all("_fa3" in name for name in with_hopper - without)
    assert with_hopper < names(attention, add_xqa=True)


def test_published_names_of_generators(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    found = aot.detect_sm_capabilities()
    assert [name for name, is_there in found.items() if is_there] == ["sm80", "sm90"] and "sm100" in found
    half, flags = [torch.float16], [False]
    specs = aot.gen_attention(half, [], [(128, 128)], [], flags, flags, True, False, True, True)
    assert len({spec.name for spec in specs}) == 6 * 3, "six kinds of head dimensions 128, 256 with soft cap and 64"
