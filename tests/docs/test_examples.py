# SPDX-License-Identifier: Apache-2.0
"""The examples, the demo and the code in the documentation run and print the documented results."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from flashinfer.jit import env as jit_env

from ..fresh_process import run_python
from .documents import ROOT


@pytest.fixture
def run(tmp_path):
    """Run Python from the checkout in an empty folder, with the cache of all tests unless variables name another."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call(*arguments, **variables):
        done = run_python(arguments, env={**env, **variables}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_demo_is_cold_once(run, tmp_path):
    """Check that the first run compiles and prints it, and that the second run finds the module."""
    cache = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_JIT_DEBUG": "1"}  # half the compile time
    first = run(str(ROOT / "examples" / "demo.py"), **cache)
    assert "cold: compiled in" in first
    assert str(tmp_path) in first
    assert first.count("agrees with torch") == 3
    assert re.search(r"flashinfer +[\d.]+ us +[\d.]+ GB/s", first)
    assert "warm: found in the cache" in run(str(ROOT / "examples" / "demo.py"), **cache)


def test_quickstart(run):
    text = run(str(ROOT / "examples" / "quickstart.py"))
    assert "agrees with torch" in text
    assert str(jit_env.FLASHINFER_JIT_DIR) in text


@pytest.mark.parametrize("script", ["demo.py", "serve"])
def test_missing_compiler_is_one_line(script, tmp_path):
    """Check a machine without a C++ compiler: the remedy is on one line, not at the end of a traceback."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "FLASHINFER_CXX_LAUNCHER", "CUDA_VISIBLE_DEVICES")}
    env = {**kept, "PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PATH": "/nowhere"}
    done = run_python([ROOT / "examples" / script], env={**env, "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
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
    done = run_python([ROOT / "scripts" / "columns.py", "nrom"])
    assert done.returncode == 1
    assert "columns: family is 'nrom', expected one of" in done.stderr


def test_included_code_is_current():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "include_code.py")], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python scripts/include_code.py --write"
