# SPDX-License-Identifier: Apache-2.0
"""A failed build reports the error, the log file and the command to repeat, and leaves no trusted module."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess

import pytest

from flashinfer._runtime.errors import MissingJITCacheError
from flashinfer.jit import build, build_jit_specs, gen_jit_spec, manifest, toolchain

from .toolbox import TINY, fake_cxx, in_processes

BROKEN = TINY.replace("= ANSWER;", "= NO_SUCH_NAME;")


def failure(spec) -> str:
    with pytest.raises(RuntimeError) as caught:
        spec.build_and_load()
    return str(caught.value)


def repeat_command(text: str) -> list[str]:
    return shlex.split(re.search(r"^  repeat: +(.*)$", text, re.M)[1])


def test_compile_error(workshop):
    spec = workshop.spec(text=BROKEN)
    text = failure(spec)
    first, log_line, _ = text.splitlines()
    assert first.startswith("Ninja build failed for tiny: ")
    assert re.search(r"tiny\.cpp:\d+:\d+: error: .*NO_SUCH_NAME", first)
    log = spec.build_dir / "build.log"
    assert log_line.endswith(str(log))
    assert "NO_SUCH_NAME" in log.read_text()
    assert not spec.jit_library_path.exists()
    assert not list(spec.build_dir.glob(".build-*"))


def test_repeat_command_shows_the_error_and_then_the_success(workshop, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "with blank"))
    spec = workshop.spec(text=BROKEN)
    command = repeat_command(failure(spec))
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode != 0
    assert "NO_SUCH_NAME" in again.stdout
    workshop.source(text=TINY)
    subprocess.run(command, check=True, capture_output=True)
    assert spec.jit_library_path.exists()
    assert not spec.is_fresh()  # a library made by hand is not trusted
    assert spec.build_and_load().answer() == 42


def test_first_error_is_the_compilers(workshop, tmp_path, monkeypatch):
    """Check that words in the command, which ninja echoes, are not reported as the error."""
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-Wno-error -DNOTE='fatal error: not this one'")
    assert "NO_SUCH_NAME" in failure(workshop.spec(text=BROKEN)).splitlines()[0]


@pytest.mark.parametrize(
    ("before", "expected"),
    [("exit 3", "FAILED: .*tiny.o"), ("echo I give up; exit 3", "I give up"), ("exit 0", "mv: cannot stat .*")],
)
def test_compilers_that_say_little(workshop, before, expected):
    """Check compilers with little output: "ninja: build stopped" alone would not help."""
    fake_cxx(workshop.cxx, before=before)
    assert re.fullmatch(rf"Ninja build failed for tiny: {expected}", failure(workshop.spec()).splitlines()[0].rstrip())


def test_compilers_speak_english(workshop, monkeypatch):
    """Check that compilers run in English: the report searches for the word "error", whatever the user's language."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    fake_cxx(workshop.cxx, before='echo "error: in $LC_ALL"; exit 1')
    assert failure(workshop.spec()).splitlines()[0].endswith("error: in C")


def test_a_launcher_that_is_not_there(workshop, monkeypatch):
    """Check that the shell's words are reported. They depend on whether this user may read every folder of ``PATH``."""
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", "no-such-launcher")
    assert re.search("no-such-launcher.*(not found|Permission denied)", failure(workshop.spec()).splitlines()[0])


def test_undefined_symbol_is_a_link_error(workshop):
    """Check that an undefined symbol fails at link time, not at load time."""
    text = failure(workshop.spec(text="int missing();\n" + TINY.replace("= ANSWER;", "= missing();")))
    assert "undefined reference to `missing()'" in text.splitlines()[0]


def test_failed_rebuild_does_not_bring_back_the_old_module(workshop):
    spec = workshop.spec()
    spec.build()
    workshop.source(text=BROKEN)
    failure(spec)
    assert not spec.is_fresh()
    workshop.source(text=TINY)
    assert spec.is_fresh()  # the old library matches this source


def test_missing_source(workshop):
    spec = gen_jit_spec("op", [workshop.src / "none.cpp"], backend="cpu")
    assert failure(spec) == f"op: source {workshop.src / 'none.cpp'} does not exist"


def test_no_host_compiler(workshop, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    text = failure(workshop.spec())
    assert text == f"tiny: {toolchain.NO_CXX}" and "\n" not in text
    assert "apt-get install g++" in text and "flashinfer-jit-cache" in text  # the two remedies


def test_no_nvcc(workshop, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_NVCC", "/nonexistent/nvcc")
    text = failure(workshop.spec("op", backend="cuda"))
    assert text.startswith("op: cannot find nvcc: looked at $FLASHINFER_NVCC")
    assert "pip install 'flashinfer-python[nvcc]'" in text and "flashinfer-jit-cache" in text  # the two remedies
    assert "\n" not in text


def test_no_ninja(workshop, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else name)
    assert failure(workshop.spec()) == "cannot find ninja: `pip install ninja`"
    assert not list(workshop.base.rglob(".build-*"))


@pytest.mark.parametrize("names", [["tiny"], ["tiny", "other"]])
def test_killed_linker_leaves_no_module(workshop, names):
    """Check a linker killed by the out-of-memory killer: its partial output must not be published."""
    half = 'head -c 3000 /dev/zero > "$out"; kill -9 $$'
    find_output = 'out=; last=; for a in "$@"; do [ "$last" = -o ] && out=$a; last=$a; done'
    fake_cxx(workshop.cxx, before=f'{find_output}\ncase "$out" in */tiny.so*) {half};; esac')
    specs = [workshop.spec(name) for name in names]
    with pytest.raises(RuntimeError, match="Ninja build failed for tiny"):
        build_jit_specs(specs)
    assert not specs[0].jit_library_path.exists()
    assert [s.name for s in specs if s.is_fresh()] == names[1:]


def test_one_failing_module_does_not_stop_the_others(workshop):
    good, bad, late = workshop.spec("good"), workshop.spec("bad", text=BROKEN), workshop.spec("late")
    with pytest.raises(RuntimeError, match=r"Ninja build failed for bad: .*NO_SUCH_NAME"):
        build_jit_specs([bad, good, late])
    assert good.is_fresh()
    assert late.is_fresh()
    assert not bad.is_fresh()
    before = len(workshop.calls)
    assert good.build_and_load().answer() == 42
    assert len(workshop.calls) == before


def test_one_module_that_cannot_be_published_does_not_stop_the_others(workshop, monkeypatch):
    good, bad, late = workshop.spec("good"), workshop.spec("bad"), workshop.spec("late")
    publish = build._publish

    def fail(spec, *more):
        if spec is bad:
            raise OSError(28, "No space left on device")
        publish(spec, *more)

    monkeypatch.setattr(build, "_publish", fail)
    with pytest.raises(RuntimeError, match="bad: cannot write to the cache directory"):
        build_jit_specs([bad, good, late])
    assert [spec.is_fresh() for spec in (good, bad, late)] == [True, False, True]


def test_group_is_one_graph(workshop, monkeypatch):
    runs, real = [], build.watch_ninja
    monkeypatch.setattr(build, "watch_ninja", lambda *arguments: runs.append(arguments) or real(*arguments))
    build_jit_specs([workshop.spec(name) for name in "abc"])
    assert len(runs) == 1
    assert len(workshop.calls) == 6
    build_jit_specs([workshop.spec(name) for name in "abcd"])  # only d is not built yet
    assert len(workshop.calls) == 8


# ------------------------------------------------------------------------------------------------ full disk


def test_full_disk(workshop):
    """Limit file sizes to 4 KiB, as on a disk that is nearly full: compiler and linker hit the limit."""
    spec = workshop.spec()

    def build(_):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        spec.build()

    (text,) = in_processes(1, build)
    assert "Ninja build failed for tiny" in text
    assert re.search(r"File too large|file size limit", text, re.I)
    assert not spec.is_fresh()
    assert spec.build_and_load().answer() == 42


@pytest.mark.parametrize("step", ["build._prepare", "build.write_manifest", "build.write_if_different"])
def test_full_disk_in_our_own_writes(workshop, monkeypatch, step):
    def full(*_):
        raise OSError(28, os.strerror(28))

    spec = workshop.spec()
    spec.generated = {workshop.src / "extra.h": ""}
    with monkeypatch.context() as patch:
        patch.setattr(f"flashinfer.jit.{step}", full)
        text = failure(spec)
    assert text.startswith(f"tiny: cannot write to the cache directory {spec.build_dir} (No space left on device)")
    assert "FLASHINFER_WORKSPACE_BASE" in text
    assert not spec.is_fresh()
    assert not list(spec.build_dir.glob(".build-*"))
    assert spec.build_and_load().answer() == 42


# ------------------------------------------------------------------------------------------------ disabled JIT


def test_disabled_jit_loads_what_is_there(workshop, monkeypatch):
    workshop.spec().build()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert workshop.spec().build_and_load().answer() == 42


@pytest.mark.parametrize("value", ["1", "0", "yes"])
def test_disabled_jit_refuses_the_rest(workshop, monkeypatch, value):
    """Check that any value that is not empty disables JIT."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", value)
    spec = workshop.spec()
    with pytest.raises(MissingJITCacheError, match=r"tiny: no usable module in the cache \(not built\)") as caught:
        spec.build_and_load()
    assert caught.value.spec is spec
    assert isinstance(caught.value, RuntimeError)
    assert workshop.calls == []
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "")
    assert spec.build_and_load().answer() == 42


def test_disabled_jit_names_why_a_module_is_stale(workshop, monkeypatch):
    workshop.spec().build()
    workshop.set_answer(1)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(MissingJITCacheError, match=r"answer\.h changed"):
        workshop.spec().build_and_load()


def test_disabled_jit_does_not_rebuild_what_does_not_load(workshop, monkeypatch):
    spec = workshop.spec()
    spec.build()
    text = manifest.manifest_path(spec.jit_library_path).read_text()
    digest = manifest._digest(spec.jit_library_path.read_bytes())
    spec.jit_library_path.write_bytes(b"x")
    manifest.manifest_path(spec.jit_library_path).write_text(text.replace(digest, manifest._digest(b"x")))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(MissingJITCacheError, match="it does not load"):
        spec.build_and_load()
