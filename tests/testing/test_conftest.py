# SPDX-License-Identifier: Apache-2.0
"""tests/conftest.py itself, in a nested pytest run."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SAMPLE = """
import pytest, torch
from flashinfer.errors import MissingJITCacheError

def test_torch_out_of_memory():
    raise torch.cuda.OutOfMemoryError("tried to allocate 80 GiB")

def test_native_out_of_memory():
    raise RuntimeError("rmsnorm: CUDA error: out of memory")

def test_missing_module():
    raise MissingJITCacheError("norm is not built")

def test_other_errors_fail():
    raise RuntimeError("out of patience")

@pytest.mark.parametrize("run", [1, 2])
def test_seed(run):
    assert torch.initial_seed() == 0
    torch.manual_seed(run)

def test_device(device):
    assert torch.empty(1, device=device).device.type == device
"""


def run_pytest(folder, text, *options):
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_sample.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-v", "--rootdir", folder, folder]
    return subprocess.run([*map(str, command), *options], capture_output=True, text=True, cwd=ROOT).stdout


def test_skips_seed_and_device(tmp_path):
    out = run_pytest(tmp_path, SAMPLE)
    assert "test_other_errors_fail FAILED" in out and "1 failed" in out and "3 skipped" in out, out
    assert "CUDA out of memory: tried to allocate 80 GiB" in out
    assert "modules missing from the JIT cache" in out and "norm is not built" in out
    assert "test_device[cpu] PASSED" in out and "test_seed[2] PASSED" in out


def test_sample(tmp_path):
    text = """
import pytest

def test_alone(): pass

@pytest.mark.parametrize("i", range(100))
def test_many(i): pass
"""
    first, second = (run_pytest(tmp_path, text, "--sample", "0.5") for _ in range(2))
    assert "6 passed, 95 deselected" in first and "test_alone PASSED" in first
    names = [{line.split()[0] for line in out.splitlines() if "PASSED" in line} for out in (first, second)]
    assert len(names[0]) == 6 and names[0] == names[1]
