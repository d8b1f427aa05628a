# SPDX-License-Identifier: Apache-2.0
"""A pre-built CUDA module of flashinfer-jit-cache loads on a machine with neither nvcc nor a host compiler.

There is no GPU here: ``FLASHINFER_CUDA_ARCH_LIST`` stands in for it, and the call ends where the launcher asks for a
CUDA tensor. No process may be started, and nothing may be written to the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.packaging.tree import ROOT

PROGRAM = """
import shutil
import sys

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def forbid(event, arguments):
    if event in STARTS:
        raise AssertionError(f"{event} {arguments}")


import torch

sys.addaudithook(forbid)
import flashinfer
from flashinfer.jit.concat_ops import gen_concat_ops_modules
from flashinfer.jit.toolchain import find_cxx, find_nvcc

assert find_nvcc() is None and find_cxx() is None and shutil.which("ninja") is None
(spec,) = gen_concat_ops_modules("cuda")
assert spec.is_aot and spec.is_compiled
module = spec.build_and_load()
print(spec.get_library_path())
x = torch.zeros(2, 4, 192, dtype=torch.bfloat16)
try:
    module.concat_mla_k(x, x[..., :128].contiguous(), x[:, :1, :64].contiguous())
except (RuntimeError, ValueError) as error:
    print(str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def site(nvcc, tmp_path_factory):
    """Build the wheel of one family for one CUDA target, and install it into a folder."""
    folder = tmp_path_factory.mktemp("jit-cache-cuda")
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_AOT")}
    env |= {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_EXTRA_CFLAGS": "-O0"}  # O0: half the host compile time
    words = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), "-Caot=--family concat_ops"]
    done = subprocess.run(
        [sys.executable, *words, str(ROOT / "flashinfer-jit-cache")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.iterdir()
    assert "+cu" in wheel.name
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, *words, str(wheel)], check=True, capture_output=True)
    return folder / "site"


def run(site, tmp_path, targets: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "CUDA_"))}
    env = {k: v for k, v in kept.items() if k not in ("CXX", "CC")} | {
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
        "FLASHINFER_NVCC": str(tmp_path / "nvcc"),
        "FLASHINFER_CUDA_ARCH_LIST": targets,
    }
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)


def test_loads_without_any_compiler(site, tmp_path):
    done = run(site, tmp_path, "9.0a")
    assert done.returncode == 0, done.stderr
    library, refused = done.stdout.splitlines()
    assert library == str(site / "flashinfer_jit_cache" / "jit_cache" / "concat_mla" / "concat_mla.so")
    assert "CUDA" in refused and "concat_mla_k" in refused
    assert not (tmp_path / "base").exists(), "nothing was built"


def test_other_targets_are_not_taken_from_it(site, tmp_path):
    """Check a GPU that the wheel has no code for: loading would fail at the first launch, so it is not loaded."""
    done = run(site, tmp_path, "8.0")
    assert done.returncode != 0 and "AssertionError" in done.stderr
    assert "are for 90a, not for 80" in done.stderr
