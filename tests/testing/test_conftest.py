# SPDX-License-Identifier: Apache-2.0
"""tests/conftest.py itself, in a pytest of its own."""

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


def test_skips_seed_and_device(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        "-v",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    out = done.stdout
    assert "test_other_errors_fail FAILED" in out and "1 failed" in out and "3 skipped" in out, out
    assert "CUDA out of memory: tried to allocate 80 GiB" in out
    assert "modules missing from the JIT cache" in out and "norm is not built" in out
    assert "test_device[cpu] PASSED" in out and "test_seed[2] PASSED" in out
