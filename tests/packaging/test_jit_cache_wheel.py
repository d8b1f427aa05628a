# SPDX-License-Identifier: Apache-2.0
"""The package flashinfer-jit-cache, built and installed: the first call compiles nothing and needs no compiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile

import pytest

from flashinfer.jit import cpu_targets

from .tree import ROOT

VERSION = (ROOT / "version.txt").read_text().strip()
LEVEL = list(cpu_targets.LEVELS[platform.machine()])[-1]

PROGRAM = """
import shutil
import torch
import flashinfer
from flashinfer.jit import env
from flashinfer.jit.activation import gen_activation_modules

assert not any(shutil.which(tool) for tool in ("c++", "g++", "clang++", "cc", "nvcc", "ninja"))
x = torch.randn(2, 64, dtype=torch.bfloat16)
expected = torch.nn.functional.silu(x[:, :32].float()) * x[:, 32:].float()
torch.testing.assert_close(flashinfer.silu_and_mul(x).float(), expected, atol=1e-2, rtol=1e-2)
(spec,) = gen_activation_modules("cpu")
print(spec.get_library_path())
print(env.FLASHINFER_AOT_DIR)
"""


@pytest.fixture(scope="module")
def jit_cache(tmp_path_factory):
    """Build the wheel with one small module, as ``python -m build --no-isolation --wheel`` does."""
    out = tmp_path_factory.mktemp("jit-cache")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out)]
    options = f"-Caot=--family activation --cpu-target {LEVEL}"
    env = {k: v for k, v in os.environ.items() if k != "FLASHINFER_CUDA_ARCH_LIST"}
    env["FLASHINFER_JIT_DEBUG"] = "1"  # half the compile time
    folder = ROOT / "flashinfer-jit-cache"
    done = subprocess.run([*command, options, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def site(jit_cache, tmp_path_factory):
    target = tmp_path_factory.mktemp("jit-cache-site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(jit_cache)], check=True, capture_output=True)
    return target


def test_wheel(jit_cache):
    name, tag = jit_cache.name.split("-py3-none-")
    assert name == f"flashinfer_jit_cache-{VERSION}+cpu"
    assert tag.startswith("manylinux_2_") and tag.endswith(f"_{platform.machine()}.whl")
    with zipfile.ZipFile(jit_cache) as archive:
        names = {n for n in archive.namelist() if ".dist-info" not in n}
    folder = "flashinfer_jit_cache"
    module = f"{folder}/jit_cache/cpu-{LEVEL}/activation_cpu/activation_cpu.so"
    index = f"{folder}/jit_cache/index.json"
    assert names == {f"{folder}/__init__.py", f"{folder}/_version.py", index, module}


def test_first_call_needs_no_compiler(site, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_") and k not in ("CXX", "CC")}
    env |= {
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library, folder = done.stdout.splitlines()
    assert folder == str(site / "flashinfer_jit_cache" / "jit_cache")
    assert library == f"{folder}/cpu-{LEVEL}/activation_cpu/activation_cpu.so"
    assert not (tmp_path / "base").exists(), "nothing was built"
    assert "ignored" not in done.stderr
