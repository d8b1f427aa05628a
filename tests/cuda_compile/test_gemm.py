# SPDX-License-Identifier: Apache-2.0
"""The general GEMM kernel compiles for other chips without spills, and for Hopper without copies that it rejects."""

from __future__ import annotations

import subprocess

import pytest

from flashinfer.jit import env as jit_env
from flashinfer.jit.gemm import gen_gemm_module

from .fatbin import compile_units
from .machine_code import COPY, COPY_UNIFORM, operations
from .options import NO_SPILLS

FULL = pytest.mark.full
#: A unit per target; test_family of test_cuda_compile.py compiles all units for 9.0a.
UNITS = [("8.0", "fp8_scaled"), ("8.9", "fp8"), ("10.0a", "bf16_any"), ("12.0a", "bf16")]


@pytest.mark.parametrize("target, unit", UNITS)
def test_other_targets(hopper, monkeypatch, tmp_path, target, unit):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", NO_SPILLS)
    module = gen_gemm_module("cuda")
    sources = [path for path in module.generated if path.stem == f"gemm_{unit}"]
    assert len(sources) == 1
    compile_units(tmp_path, sources, module.generated)


@pytest.mark.parametrize("unit", ["bf16", *(pytest.param(u, marks=FULL) for u in ("fp8_scaled", "bf16_columns"))])
def test_copies(nvcc, tmp_path, unit):
    """Check for the instructions that test_copy_addresses.py describes, and for spills."""
    text = next(text for path, text in gen_gemm_module("cuda").generated.items() if path.stem == f"gemm_{unit}")
    source, cubin = tmp_path / "unit.cu", tmp_path / "unit.cubin"
    source.write_text(text)
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "-arch=sm_90a", f"-I{jit_env.FLASHINFER_INCLUDE_DIR}", "-cubin"]
    flags += NO_SPILLS.split()
    subprocess.run([nvcc, *flags, source, "-o", cubin], check=True)
    found = list(operations(cubin.read_bytes()))
    assert COPY in found and COPY_UNIFORM not in found
