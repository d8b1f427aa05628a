# SPDX-License-Identifier: Apache-2.0
"""C++ programs use the kernels with include/ and cudart alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .options import COMPILES

EXAMPLE = Path(__file__).parents[2] / "examples" / "header_only"


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arch", ["75", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("80", "90a"))])
def test_decode_compiles(nvcc, arch, tmp_path):
    """Compile the device code of the example; the CMake project below has its host code, for 90a."""
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    include = EXAMPLE.parents[1] / "include"
    flags = ["-std=c++17", target, "-I", include, *COMPILES.split()]
    run(nvcc, *flags, EXAMPLE / "decode.cu", "-cubin", "-o", tmp_path / "decode.cubin")


def test_decode_is_a_cmake_project(nvcc, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    build = tmp_path / "build"
    run("cmake", "-S", EXAMPLE, "-B", build, f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_ARCHITECTURES=90a")
    run("cmake", "--build", build)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        run(build / "decode")
