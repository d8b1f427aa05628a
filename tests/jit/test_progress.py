# SPDX-License-Identifier: Apache-2.0
"""Progress output while modules build."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from flashinfer.jit import build_jit_specs, progress

from .toolbox import fake_cxx


@pytest.fixture
def slow(workshop, monkeypatch):
    """Set build steps of 0.3 s while the longest silence is 0.2 s."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.2)
    fake_cxx(workshop.cxx, before="sleep 0.3")
    return workshop


def test_one_second_of_silence():
    assert progress.QUIET_SECONDS == 1.0


def test_quick_build_says_nothing(workshop, capfd):
    workshop.spec().build()
    assert capfd.readouterr() == ("", "")


def test_slow_build_says_what_and_how_long(slow, capfd):
    slow.spec().build()
    out, err = capfd.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert re.fullmatch(r"flashinfer: building tiny, step 1 of 2, \d\.\d s", first)
    assert re.fullmatch(r"flashinfer: built tiny in \d\.\d s", last)


def test_slow_build_that_fails(slow, capfd):
    with pytest.raises(RuntimeError, match="Ninja build failed"):
        slow.spec(text="#error no").build()
    assert "flashinfer: failed to build tiny in" in capfd.readouterr().err


def test_warm_start_says_nothing(slow, capfd):
    slow.spec().build()
    capfd.readouterr()
    slow.spec().build_and_load()
    assert capfd.readouterr() == ("", "")


def test_long_group_is_abbreviated(slow, capfd):
    build_jit_specs([slow.spec(name) for name in "abcde"])
    assert "building a, b, c and 2 more" in capfd.readouterr().err


def test_names_are_short():
    """Check names of attention modules, which have 150 letters: a line on a terminal must not wrap."""
    prefill = [
        f"batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{q}_dtype_o_{q}_head_dim_qk_128" for q in ("f16", "bf16")
    ]
    assert progress.some_of([*prefill, "norm"]) == "batch_prefill_with_kv_cache, norm"
    assert progress.some_of([*"abcd", *prefill]) == "a, b, c and 3 more"
    assert progress.some_of(["x" * 90]) == "x" * 37 + "..."
    bar = progress.ProgressBar(prefill)
    bar.step(1, 2, f"{prefill[0]}: {'y' * 90}.cu")
    assert bar.bar.postfix == f"batch_prefill_with_kv_cache: {'y' * 37}..."
    bar.bar.close()


def test_terminal_shows_steps_in_place(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.ProgressLine(["norm"]) as line:
        line.step(1, 4, "norm.cu")
        time.sleep(0.4)
    text = sys.stderr.getvalue()
    assert "\rflashinfer: building norm, step 2 of 4" in text  # the first step is done
    assert text.count("\n") == 1


class _WritesOnly:
    """Replacement of stderr with few methods, as some programs install it; its pipe is broken, too."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None: ...


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, _closed(), _WritesOnly()], ids=["none", "closed", "broken"])
def test_builds_without_anybody_to_tell(slow, monkeypatch, stream):
    """Check that a build does not fail without stderr, as in a service."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    slow.spec().build(verbose=True)
    build_jit_specs([slow.spec(name) for name in "ab"], progress=progress.ProgressBar)
    assert slow.spec().is_fresh() and slow.spec("b").is_fresh()


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_verbose_shows_commands(workshop, monkeypatch, capfd, how):
    if how == "variable":
        monkeypatch.setenv("FLASHINFER_JIT_VERBOSE", "1")
        workshop.spec().build()
    else:
        workshop.spec().build(verbose=True)
    out = capfd.readouterr().out
    assert f"{workshop.cxx} -x c++" in out
    assert "-shared" in out
    assert "-O3" in out  # verbose does not imply debug


def test_argument_beats_the_variable(workshop, monkeypatch, capfd):
    monkeypatch.setenv("FLASHINFER_JIT_VERBOSE", "1")
    workshop.spec().build(verbose=False)
    assert capfd.readouterr().out == ""
