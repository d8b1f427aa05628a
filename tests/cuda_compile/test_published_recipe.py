# SPDX-License-Identifier: Apache-2.0
"""Published code compiles the norm family by hand: launcher and binding through nvcc, without our generator."""

from __future__ import annotations

from flashinfer.jit import env
from flashinfer.jit.core import gen_jit_spec

from .options import COMPILES


def test_norm_compilation_without_fp8(hopper, monkeypatch):
    """Check that the launcher includes its kernels when nvcc compiles it; bfloat16 is the only extra type requested."""
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", COMPILES)
    sources = [env.FLASHINFER_CSRC_DIR / "norm.cu", env.FLASHINFER_CSRC_DIR / "flashinfer_norm_binding.cu"]
    module = gen_jit_spec("norm_without_fp8", sources, extra_cuda_cflags=["-DENABLE_BF16"]).build_and_load()
    assert module is not None and callable(module.rmsnorm)
