# SPDX-License-Identifier: Apache-2.0
"""JitSpec: its fields, its files, building and loading, and the registry of specs."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from flashinfer.jit import JitSpec, clear_cache_dir, gen_jit_spec, jit_spec_registry
from flashinfer.jit import env as jit_env
from flashinfer.jit.core import write_if_different
from flashinfer.version import __version__

from .toolbox import TINY, calls


def test_fields():
    names = {field.name for field in dataclasses.fields(JitSpec)}
    assert {"name", "sources", "extra_cflags", "extra_cuda_cflags", "extra_ldflags"} <= names


def test_both_ways_to_call_the_generator(workshop, toolkit):
    source = workshop.source("op", ".cu")
    by_name = gen_jit_spec(name="op", sources=[source], extra_cuda_cflags=["-DX"])
    by_position = gen_jit_spec("op", [str(source)], extra_cuda_cflags=["-DX"])
    for spec in (by_name, by_position):
        assert isinstance(spec, JitSpec)
        assert (spec.name, spec.sources, spec.extra_cuda_cflags[-1]) == ("op", [source], "-DX")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/op", "x" * 231, "a\nb", "a\0b", None, Path("op")])
def test_a_name_is_that_of_a_file(name):
    with pytest.raises(ValueError, match=r"gen_jit_spec: name must be a file name of at most 230 bytes, got "):
        gen_jit_spec(name, ["op.cpp"], backend="cpu")


@pytest.mark.parametrize("sources", ["op.cpp", Path("op.cpp"), None, [None]])
def test_sources_are_several(sources):
    with pytest.raises(ValueError, match=r"gen_jit_spec: op: sources must be a list of files, got "):
        gen_jit_spec("op", sources, backend="cpu")


@pytest.mark.parametrize(
    "given",
    [{f"extra_{kind}": "-DX"} for kind in ("cflags", "cuda_cflags", "ldflags")] + [{"extra_include_paths": "."}],
)
def test_flags_are_several(given):
    """Check that a string is rejected: its letters would become flags (``- D X``)."""
    (argument,) = given
    with pytest.raises(ValueError, match=rf"gen_jit_spec: op: {argument} must be a list of .*, got '.*'"):
        gen_jit_spec("op", ["op.cpp"], backend="cpu", **given)


def test_backends_are_two():
    with pytest.raises(ValueError, match="gen_jit_spec: op: backend must be cuda or cpu, got 'rocm'"):
        gen_jit_spec("op", ["op.cpp"], backend="rocm")


def test_the_longest_name_builds(workshop):
    assert workshop.spec("x" * 230).build_and_load().answer() == 42


def test_making_a_spec_touches_no_disk(workshop):
    workshop.spec()
    assert list(workshop.base.iterdir()) == []


@pytest.mark.parametrize("targets, tag", [("9.0a", "90a"), ("9.0a 8.0", "80_90a")])
def test_where_files_go(workshop, toolkit, monkeypatch, targets, tag):
    """Check the documented tree: <base>/.cache/flashinfer/<version>/<targets>/{cached_ops,generated}/<name>/."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", targets)
    tree = workshop.base / ".cache" / "flashinfer" / __version__ / tag
    generated = jit_env.FLASHINFER_GEN_SRC_DIR / "op" / "op.cu"
    spec = gen_jit_spec(
        "op", [generated], generated={generated: TINY, generated.with_name("answer.h"): "#define ANSWER 1\n"}
    )
    spec.write_ninja()
    assert (tree / "cached_ops" / "op" / "build.ninja").read_text() == spec.ninja_path.read_text()
    spec.build()
    assert (tree / "generated" / "op" / "op.cu").read_text() == TINY
    assert {p.name for p in (tree / "cached_ops" / "op").iterdir()} == {
        "build.ninja",
        "op_op.cuda.o",
        "op.so",
        "op.manifest.json",
    }
    assert spec.get_library_path() == tree / "cached_ops" / "op" / "op.so"
    assert spec.get_object_paths() == [tree / "cached_ops" / "op" / "op_op.cuda.o"]
    assert (tree / "cached_ops" / "op.lock").exists()  # deleting the lock would race with a waiting process


def test_directories_have_their_roles(workshop, toolkit):
    package = Path(jit_env.__file__).parents[1]
    assert (jit_env.FLASHINFER_CSRC_DIR / "tvm_ffi_utils.h").is_file()
    assert (jit_env.FLASHINFER_INCLUDE_DIR / "flashinfer" / "backend.h").is_file()
    assert str(jit_env.FLASHINFER_AOT_DIR) == f"{package}/data/aot"
    cutlass = package / "data" / "cutlass"
    assert [cutlass / "include", cutlass / "tools" / "util" / "include"] == jit_env.CUTLASS_INCLUDE_DIRS
    assert [path.relative_to(cutlass.parent).parts[0] for path in jit_env.CCCL_INCLUDE_DIRS] == ["cccl"] * 3
    assert cutlass.parent / "spdlog" / "include" == jit_env.SPDLOG_INCLUDE_DIR
    for name in ("CACHE", "WORKSPACE", "JIT", "GEN_SRC"):
        assert workshop.base in getattr(jit_env, f"FLASHINFER_{name}_DIR").parents
    with pytest.raises(AttributeError, match="FLASHINFER_NO_DIR"):
        _ = jit_env.FLASHINFER_NO_DIR


def test_build_and_load(workshop):
    module = workshop.spec().build_and_load()
    assert module.answer() == 42
    assert len(workshop.calls) == 2  # compile, link


def test_cuda_goes_through_nvcc_and_links_with_the_host_compiler(workshop, toolkit):
    assert workshop.spec("op", backend="cuda").build_and_load().answer() == 42
    (compile_command,) = calls(toolkit / "bin" / "nvcc")
    (link_command,) = workshop.calls
    assert compile_command.endswith("src_op.cuda.o")
    assert "-shared" in link_command


def test_rebuilt_module_is_loaded_in_the_same_process(workshop):
    """Check a rebuild in one process (an edit in a notebook): the dynamic linker caches libraries by name."""
    first = workshop.spec().build_and_load()
    workshop.set_answer(43)
    second = workshop.spec().build_and_load()
    workshop.set_answer(44)
    third = workshop.spec().build_and_load()
    assert (first.answer(), second.answer(), third.answer()) == (42, 43, 44)
    assert workshop.spec().build_and_load().answer() == 44


def test_try_load_compiles_nothing(workshop):
    spec = workshop.spec()
    assert spec.try_load() is None
    assert workshop.calls == []
    spec.build()
    assert spec.try_load().answer() == 42


def test_reset(workshop):
    """Check that deleting the cache by hand or by command is safe."""
    spec = workshop.spec()
    spec.build()
    clear_cache_dir()
    assert not spec.is_compiled
    assert spec.build_and_load().answer() == 42
    shutil.rmtree(workshop.base / ".cache")
    assert spec.build_and_load().answer() == 42
    assert len(workshop.calls) == 6


def test_reset_of_a_folder_bound_by_hand(workshop, monkeypatch, tmp_path):
    """Check a folder bound by hand, as pre-building does: clearing deletes that folder and nothing else."""
    kept = workshop.spec("kept")
    kept.build()
    monkeypatch.setitem(vars(jit_env), "FLASHINFER_JIT_DIR", tmp_path / "aot" / "cached_ops")
    workshop.spec("gone").build()
    (tmp_path / "aot" / "generated").mkdir()
    clear_cache_dir()
    assert [path.name for path in (tmp_path / "aot").iterdir()] == ["generated"]
    monkeypatch.delitem(vars(jit_env), "FLASHINFER_JIT_DIR")
    assert kept.is_compiled


def test_relative_paths(workshop, monkeypatch):
    """Check relative paths of sources and cache: ninja runs in the module's directory."""
    workshop.source()
    monkeypatch.chdir(workshop.src)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "../base")
    monkeypatch.setenv("CXX", os.path.relpath(workshop.cxx))
    assert gen_jit_spec("tiny", ["tiny.cpp"], backend="cpu").build_and_load().answer() == 42
    assert list(workshop.base.rglob("tiny.so"))


def test_empty_variable_means_unset(workshop, monkeypatch):
    monkeypatch.setenv("HOME", str(workshop.base))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")
    assert str(jit_env.FLASHINFER_CACHE_DIR) == f"{workshop.base}/.cache/flashinfer"


def test_write_if_different(tmp_path):
    path = tmp_path / "new" / "file.inc"
    write_if_different(path, "one")
    os.utime(path, ns=(1, 1))
    write_if_different(path, "one")
    assert path.stat().st_mtime_ns == 1
    write_if_different(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mtime_ns != 1
    assert [p.name for p in path.parent.iterdir()] == ["file.inc"]


def test_write_ninja_keeps_an_equal_file(workshop):
    spec = workshop.spec()
    spec.write_ninja()
    os.utime(spec.ninja_path, ns=(1, 1))
    spec.write_ninja()
    assert spec.ninja_path.stat().st_mtime_ns == 1


def test_registry(workshop):
    built, other = workshop.spec("built"), workshop.spec("other")
    built.build()
    assert jit_spec_registry.get_all_specs() == {"built": built, "other": other}
    assert jit_spec_registry.get_stats() == {"total": 2, "compiled": 1, "not_compiled": 1}
    first, second = jit_spec_registry.get_all_statuses()
    assert (first.name, first.status, first.library_path) == ("built", "Compiled", built.jit_library_path)
    assert (second.name, second.status, second.library_path) == ("other", "Not Compiled", None)
    assert jit_spec_registry.get_spec_status("third") is None


def test_old_targets_are_refused(workshop, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "6.0 7.0")
    with pytest.raises(RuntimeError, match="FlashInfer requires GPUs with sm75 or higher"):
        workshop.spec("op", backend="cuda")


def test_no_target(workshop, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = workshop.spec("op", backend="cuda")
    with pytest.raises(RuntimeError, match=r"op: no CUDA target.*FLASHINFER_CUDA_ARCH_LIST"):
        spec.build_and_load()


def test_compile_commands(workshop):
    spec = workshop.spec()
    (entry,) = spec.get_compile_commands()
    assert entry["file"] == str(spec.sources[0])
    assert entry["directory"] == str(spec.build_dir)
    assert entry["command"].split()[-1] == str(spec.get_object_paths()[0])


def test_compile_commands_of_folders_with_blanks(workshop, monkeypatch):
    """Check quoting of blanks: an editor splits a command as a shell does."""
    folder = workshop.src / "two words"
    folder.mkdir()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
    source = folder / "a source.cpp"
    source.write_text("int x;\n")
    spec = gen_jit_spec("op", [source], backend="cpu")
    (entry,) = spec.get_compile_commands()
    assert shlex.split(entry["command"])[-4:] == ["-c", str(source), "-o", str(spec.get_object_paths()[0])]
