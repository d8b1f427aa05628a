# SPDX-License-Identifier: Apache-2.0
"""A wheel, installed away from the checkout, compiles and runs a kernel and never writes into itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..fresh_process import run_python
from .tree import listing

PROGRAM = """
import torch
import flashinfer
from flashinfer.jit import env

print(flashinfer.__file__)
print(env.FLASHINFER_CSRC_DIR)
y = flashinfer.rmsnorm(torch.full((2, 16), 3.0, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16))
print(y.float().mean().item())
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return target


def run(installed, workspace, *arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    env |= {
        "PYTHONPATH": str(installed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_JIT_DEBUG": "1",  # half the compile time
    }
    done = run_python(arguments, env=env, cwd=workspace)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_installed_package_compiles_and_stays_as_it_was(installed, tmp_path):
    before = listing(installed)
    where, csrc, mean = run(installed, tmp_path, "-c", PROGRAM)
    assert where == str(installed / "flashinfer" / "__init__.py")
    assert csrc == str(installed / "flashinfer" / "data" / "csrc")
    assert float(mean) == 1.0
    assert listing(installed) == before
    assert list(tmp_path.rglob("norm_cpu.so"))


def test_console_script_is_installed(installed, tmp_path):
    script = installed / "bin" / "flashinfer"
    assert script.exists()
    assert run(installed, tmp_path, str(script), "list-modules", "norm")
