# SPDX-License-Identifier: Apache-2.0
"""The modules of the chunked gated delta rule: for the CPU, for any GPU from SM80 on, and for SM90."""

from __future__ import annotations

from typing import Iterator

from ...compilation_context import sm90a_nvcc_flags
from ..attention.generate import has_hopper_target
from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_gdn_prefill_module", "gen_gdn_prefill_modules"]

_DTYPES = ("float16_t", "bfloat16_t")


def gen_gdn_prefill_module(backend: str = "cuda") -> JitSpec:
    """Describe the module for ``backend``: "cpu", "cuda", or "sm90" for the Hopper kernels."""
    is_sm90 = backend == "sm90"
    return stage(
        "gdn_prefill",
        backend="cpu" if backend == "cpu" else "cuda",
        name="gdn_prefill_sm90" if is_sm90 else None,
        kernels={t: {"dtype": t, "is_sm90": is_sm90} for t in _DTYPES},
        extra_cuda_cflags=sm90a_nvcc_flags if is_sm90 else (),
    )


def gen_gdn_prefill_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_gdn_prefill_module(backend)
    if backend == "cuda" and has_hopper_target():
        yield gen_gdn_prefill_module("sm90")
