# SPDX-License-Identifier: Apache-2.0
"""The examples, the demo and the code in the documentation run and print the documented results."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .documents import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run Python from the checkout with a cache that starts empty and is shared by the tests of this file."""
    cache = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": str(cache)}

    def call(*arguments, **variables):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env={**env, **variables}, cwd=cache, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call.cache = cache
    return call


def test_demo_is_cold_once(run):
    """Check that the first run compiles and prints it, and that the second run finds the module."""
    first = run(str(ROOT / "examples" / "demo.py"))
    assert "cold: compiled in" in first
    assert str(run.cache) in first
    assert first.count("agrees with torch") == 3
    assert re.search(r"flashinfer +[\d.]+ us +[\d.]+ GB/s", first)
    assert "warm: found in the cache" in run(str(ROOT / "examples" / "demo.py"))


def test_quickstart(run):
    text = run(str(ROOT / "examples" / "quickstart.py"))
    assert "agrees with torch" in text
    assert str(run.cache) in text


@pytest.mark.parametrize("script", ["demo.py", "serve.py"])
def test_missing_compiler_is_one_line(script, tmp_path):
    """Check a machine without a C++ compiler: the remedy is on one line, not at the end of a traceback."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "FLASHINFER_CXX_LAUNCHER", "CUDA_VISIBLE_DEVICES")}
    env = {**kept, "PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PATH": "/nowhere"}
    command = [sys.executable, str(ROOT / "examples" / script)]
    done = subprocess.run(
        command, env={**env, "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"{script}: \w+: cannot find a host C\+\+ compiler: .*apt-get install g\+\+\), or .*\n", done.stderr
    )


def test_readme_example(run):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(code) == 1
    assert float(run("-c", code[0])) == pytest.approx(1.0, abs=0.05)


def test_dump_and_replay(run):
    """Run the recipe of the debug-cuda-crash skill on a program that does not crash."""
    variables = {"FLASHINFER_LOGLEVEL": "10", "FLASHINFER_DUMP_DIR": "dumps", "FLASHINFER_DUMP_INCLUDE": "rmsnorm*"}
    run(str(ROOT / "examples" / "quickstart.py"), **variables)
    assert "1 passed, 0 failed" in run("-m", "flashinfer", "replay", "--dir", "dumps")


def test_columns_list_the_files_of_a_family(run):
    script = str(ROOT / "scripts" / "columns.py")
    assert "norm" in run(script)
    column = run(script, "norm")
    for file in (
        "csrc/norm.cu",
        "include/flashinfer/norm.cuh",
        "include/flashinfer/norm_cpu.h",
        "csrc/norm_jit_binding.cu",
    ):
        assert file in column


def test_columns_refuse_an_unknown_family():
    command = [sys.executable, str(ROOT / "scripts" / "columns.py"), "nrom"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "columns: family is 'nrom', expected one of" in done.stderr


def test_included_code_is_current():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "include_code.py")], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python scripts/include_code.py --write"
