# SPDX-License-Identifier: Apache-2.0
"""Rebuild rules: content decides whether a module is built again, never modification times."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from flashinfer.jit import cpp_ext, gen_jit_spec, manifest, toolchain
from flashinfer.jit import env as jit_env

from .toolbox import TINY, Workshop, calls, executable, fake_cxx, fake_nvcc, fake_toolkit, run_python


def is_rebuilt(workshop, spec) -> bool:
    before = len(workshop.calls)
    spec.build()
    return len(workshop.calls) > before


@pytest.fixture
def built(workshop):
    spec = workshop.spec()
    spec.build()
    assert len(workshop.calls) == 2
    return spec


def test_unchanged_module_runs_no_compiler(workshop, built, monkeypatch):
    monkeypatch.setattr(cpp_ext, "find_ninja", lambda: pytest.fail("asked for ninja"))
    assert not is_rebuilt(workshop, built)
    assert not is_rebuilt(workshop, workshop.spec())
    assert workshop.spec().build_and_load().answer() == 42
    assert len(workshop.calls) == 2


def test_new_content_with_the_old_mtime(workshop, built):
    (source,) = built.sources
    stamp = source.stat()
    source.write_text(TINY.replace("= ANSWER", "= 7 + ANSWER"))
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert built.staleness() == f"{source} changed"
    assert is_rebuilt(workshop, built)
    assert built.load().answer() == 49


def test_touched_source(workshop, built):
    os.utime(built.sources[0])
    os.utime(workshop.src / "answer.h")
    assert not is_rebuilt(workshop, built)


def test_header_from_the_future(workshop):
    """Check a header with a future modification time, as archives or file servers leave it: it is built once."""
    tomorrow = time.time() + 86400
    os.utime(workshop.src / "answer.h", (tomorrow, tomorrow))
    spec = workshop.spec()
    spec.build()
    assert spec.staleness() is None
    assert not is_rebuilt(workshop, spec)
    workshop.set_answer(5)
    assert spec.build_and_load().answer() == 5


def test_header_replaced_during_the_build_by_an_older_one(workshop):
    """Check ``mv`` and ``cp -p``, which keep a modification time from before the build."""
    older = workshop.src / "older.h"
    older.write_text("#define ANSWER 7\n")
    os.utime(older, (1, 1))
    header = workshop.src / "answer.h"
    fake_cxx(workshop.cxx, before=f'case "$*" in *-shared*) mv {older} {header};; esac')
    spec = workshop.spec()
    assert spec.build_and_load().answer() == 42
    assert spec.staleness() == f"{header} changed"


def test_header(workshop, built):
    workshop.set_answer(5)
    assert built.staleness() == f"{workshop.src / 'answer.h'} changed"
    assert is_rebuilt(workshop, built)
    assert built.load().answer() == 5


def test_header_that_is_gone(workshop, built):
    (workshop.src / "answer.h").unlink()
    assert built.staleness() == f"{workshop.src / 'answer.h'} is gone"


@pytest.mark.parametrize("folder", ["two words", "a$b", "a#b", "a:b", "a: b", "a'b", "a%b", "ünï"])
def test_unusual_folders(tmp_path, monkeypatch, folder):
    """Check source and cache folders whose names are special to make, ninja or the shell."""
    (tmp_path / folder).mkdir()
    workshop = Workshop(tmp_path / folder)
    monkeypatch.setenv("CXX", str(fake_cxx(tmp_path / "bin" / "cxx")))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(workshop.base))
    assert workshop.spec().build_and_load().answer() == 42
    assert workshop.spec().is_fresh()
    workshop.set_answer(43)
    assert workshop.spec().build_and_load().answer() == 43


def test_targets_of_dep_files_in_folders_with_blanks(tmp_path):
    """Check dep-files of nvcc, which escapes blanks in files but not in the target: text after its colon is no file."""
    (tmp_path / "x.o.d").write_text("/a: b/x: y.cuda.o : /a:\\ b/x:\\ y.cu \\\n    /cuda/x.h\n")
    assert manifest._dep_files(tmp_path) == {"/a: b/x: y.cu", "/cuda/x.h"}


def test_header_that_is_gone_after_the_build(workshop, monkeypatch):
    """Check a header that another process deletes during the build: the module is loaded, and rebuilt at the
    next use.
    """
    before = f"rm -f {workshop.src / 'more.h'}"
    text = '#include "more.h"\n' + TINY
    (workshop.src / "more.h").touch()
    compiler = fake_cxx(workshop.src.parent / "bin" / "last", before=f'case "$*" in *-shared*) {before};; esac')
    monkeypatch.setenv("CXX", str(compiler))
    assert workshop.spec(text=text).build_and_load().answer() == 42
    assert "more.h" in workshop.spec().staleness()


def test_several_words_of_cxx(workshop, monkeypatch):
    monkeypatch.setenv("CXX", f"nice {workshop.cxx} -DANSWER_FROM_CXX")
    assert workshop.spec(text="#ifndef ANSWER_FROM_CXX\n#error\n#endif\n" + TINY).build_and_load().answer() == 42
    assert all("-DANSWER_FROM_CXX" in call for call in workshop.calls)
    monkeypatch.setenv("CXX", f"{workshop.cxx} -DANSWER_FROM_CXX=2")
    assert workshop.spec().staleness() == "flags changed"


def test_header_of_another_header(workshop):
    inner = workshop.src / "inner folder" / "inner.h"  # dep-files escape the blank
    inner.parent.mkdir()
    inner.write_text("#define ANSWER 1\n")
    (workshop.src / "answer.h").write_text('#include "inner.h"\n')
    spec = workshop.spec(extra_include_paths=[inner.parent])
    assert spec.build_and_load().answer() == 1
    inner.write_text("#define ANSWER 2\n")
    assert spec.build_and_load().answer() == 2


@pytest.mark.parametrize("file", ["tiny.cpp", "answer.h"])
def test_file_edited_during_the_build(workshop, monkeypatch, file):
    """Check that a manifest does not claim a text that was edited after the compiler read it."""
    edited = workshop.src / file
    fake_cxx(workshop.cxx, before=f"case \"$*\" in *-shared*) echo '//' >> {edited};; esac")  # after compiling
    spec = workshop.spec()
    spec.build()
    assert spec.staleness() == f"{edited} changed"
    fake_cxx(workshop.cxx)
    assert is_rebuilt(workshop, spec)
    assert spec.is_fresh()


@pytest.mark.parametrize(
    "variable, value",
    [
        ("FLASHINFER_EXTRA_CFLAGS", "-DX"),
        ("FLASHINFER_EXTRA_LDFLAGS", "-Wl,-O1"),
        ("FLASHINFER_JIT_DEBUG", "1"),
    ],
)
def test_flags_from_the_environment(workshop, built, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert built.staleness() == "flags changed"
    assert is_rebuilt(workshop, built)
    assert not is_rebuilt(workshop, built)


def test_flags_of_the_module(workshop, built):
    assert is_rebuilt(workshop, workshop.spec(extra_cflags=["-DX"]))


@pytest.mark.parametrize(
    "variable, value",
    [("FLASHINFER_CXX_LAUNCHER", "env"), ("FLASHINFER_JIT_VERBOSE", "1"), ("MAX_JOBS", "1")],
)
def test_settings_that_do_not_change_the_result(workshop, built, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert not is_rebuilt(workshop, built)


# ------------------------------------------------------------------------------------------------ compilers


def test_other_compiler(workshop, built, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(fake_cxx(tmp_path / "same" / "cxx")))
    assert built.is_fresh()  # the version matters, not the path
    monkeypatch.setenv("CXX", str(fake_cxx(tmp_path / "newer" / "cxx", version="13.1.0")))
    assert built.staleness() == "cxx changed"


def test_updated_compiler_in_the_same_place(workshop, built):
    fake_cxx(workshop.cxx, version="13.1.0")
    toolchain._version_text.cache_clear()  # a new process
    assert built.staleness() == "cxx changed"


def test_stamp_spares_asking_a_binary_but_never_a_script(tmp_path):
    script = executable(tmp_path / "c++", "#!/bin/sh\n")
    assert toolchain.binary_stamp(script) is None
    binary = executable(tmp_path / "g++", "\x7fELF")
    assert toolchain.binary_stamp(binary) is not None
    (tmp_path / "clang++").symlink_to(executable(tmp_path / "ccache", "\x7fELF"))
    assert toolchain.binary_stamp(tmp_path / "clang++") is None


def test_no_compiler_on_the_machine(workshop, built, tmp_path):
    """Load a fresh module in a process without ninja and without any compiler."""
    code = f"""
import sys
import torch  # some releases with CUDA start processes on import
sys.modules["ninja"] = None
import subprocess
subprocess.Popen = None
from flashinfer.jit import gen_jit_spec
print(gen_jit_spec("tiny", [{str(built.sources[0])!r}], backend="cpu").build_and_load().answer())
"""
    for cxx in ("", "/nonexistent/c++"):
        done = run_python(code, PATH=str(tmp_path / "empty"), CXX=cxx, FLASHINFER_WORKSPACE_BASE=str(workshop.base))
        assert done.stdout == "42\n", done.stderr


# ------------------------------------------------------------------------------------------------ CUDA


@pytest.fixture
def cuda_built(workshop, toolkit):
    spec = workshop.spec("op", backend="cuda")
    spec.build()
    assert len(calls(toolkit / "bin" / "nvcc")) == 1
    return spec


def test_other_targets_are_another_module(workshop, toolkit, cuda_built, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    assert not cuda_built.is_fresh()
    assert is_rebuilt(workshop, cuda_built)
    for targets in ("9.0a", "8.0"):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", targets)
        assert cuda_built.is_fresh()  # both are kept


def test_other_version_is_another_module(workshop, built, monkeypatch):
    first = built.jit_library_path
    monkeypatch.setattr(jit_env, "__version__", "99.0.0")
    monkeypatch.setattr(manifest, "__version__", "99.0.0")
    assert is_rebuilt(workshop, built)
    assert built.jit_library_path != first
    assert first.exists()


def test_cuda_flags(workshop, cuda_built, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-DX")
    assert is_rebuilt(workshop, cuda_built)


def test_nvcc_threads_do_not_rebuild(workshop, cuda_built, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NVCC_THREADS", "4")
    assert not is_rebuilt(workshop, cuda_built)


def test_other_nvcc(workshop, cuda_built, tmp_path, monkeypatch):
    newer = fake_toolkit(tmp_path / "newer", build="2")
    monkeypatch.setenv("FLASHINFER_NVCC", str(newer / "bin" / "nvcc"))
    assert cuda_built.staleness() == "nvcc changed"


def test_second_spelling_of_the_toolkit(workshop, toolkit, cuda_built, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(toolkit)
    monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "link" / "bin" / "nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "link"))
    assert cuda_built.is_fresh()


def test_cuda_module_loads_without_nvcc(workshop, toolkit, cuda_built, monkeypatch):
    monkeypatch.setenv("FLASHINFER_NVCC", "/nonexistent/nvcc")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert cuda_built.build_and_load().answer() == 42


def test_updated_nvcc_behind_the_same_path(toolkit, cuda_built):
    fake_nvcc(toolkit / "bin" / "nvcc", build="2")
    toolchain._version_text.cache_clear()
    assert cuda_built.staleness() == "nvcc changed"


# ------------------------------------------------------------------------------------------------ damaged or moved


def test_truncated_library(workshop, built):
    library = built.jit_library_path
    library.write_bytes(library.read_bytes()[:1000])
    assert built.staleness() == "library changed"
    assert built.build_and_load().answer() == 42
    assert len(workshop.calls) == 4


def test_foreign_library(workshop, built):
    other = workshop.spec("other", text=TINY.replace("= ANSWER", "= 666"))
    other.build()
    shutil.copy2(other.jit_library_path, built.jit_library_path)
    assert built.build_and_load().answer() == 42


def test_foreign_module_directory(workshop, built):
    """Check a folder that contains library and manifest of another module."""
    other = workshop.spec("other", text=TINY.replace("= ANSWER", "= 666"))
    other.build()
    shutil.copy2(other.jit_library_path, built.jit_library_path)
    shutil.copy2(manifest.manifest_path(other.jit_library_path), manifest.manifest_path(built.jit_library_path))
    assert built.staleness() == "name changed"
    assert built.build_and_load().answer() == 42


def test_missing_library(built):
    built.jit_library_path.unlink()
    assert built.staleness() == "library missing"
    assert built.build_and_load().answer() == 42


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_damaged_manifest(built, text):
    manifest.manifest_path(built.jit_library_path).write_text(text)
    assert not built.is_fresh()
    assert built.build_and_load().answer() == 42


@pytest.mark.parametrize("key", ["files", "compilers", "library"])
def test_manifest_without_a_key(built, key):
    path = manifest.manifest_path(built.jit_library_path)
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    assert not built.is_fresh()
    assert built.build_and_load().answer() == 42


def test_fresh_but_not_loadable(workshop, built, caplog):
    """Check a library with a valid manifest that this machine cannot open: it is built here."""
    library = built.jit_library_path
    library.write_bytes(b"not a library")
    content = json.loads(manifest.manifest_path(library).read_text())
    content["library"] = manifest._digest(b"not a library")
    manifest.manifest_path(library).write_text(json.dumps(content))
    assert built.is_fresh()
    assert built.build_and_load().answer() == 42
    assert "cached tiny cannot be loaded" in caplog.text


def test_restored_cache(workshop, built, tmp_path, monkeypatch):
    """Check a cache copied to another place with new times, as a CI cache is."""
    shutil.copytree(workshop.base, tmp_path / "restored", copy_function=shutil.copyfile)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "restored"))
    assert not is_rebuilt(workshop, built)
    assert built.build_and_load().answer() == 42


def test_moved_package(workshop, tmp_path, monkeypatch):
    """Check a package reinstalled elsewhere: the same files under another directory are the same sources."""

    def spec_in(folder: Path):
        monkeypatch.setitem(vars(jit_env), "FLASHINFER_CSRC_DIR", folder)
        monkeypatch.setitem(vars(jit_env), "FLASHINFER_INCLUDE_DIR", folder)
        return gen_jit_spec("tiny", [folder / "tiny.cpp"], backend="cpu")

    workshop.source()
    spec_in(workshop.src).build()
    moved = Path(shutil.copytree(workshop.src, tmp_path / "moved"))
    assert not is_rebuilt(workshop, spec_in(moved))
    (moved / "answer.h").write_text("#define ANSWER 0\n")
    assert is_rebuilt(workshop, spec_in(moved))
