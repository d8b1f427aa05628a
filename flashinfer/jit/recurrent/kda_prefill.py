# SPDX-License-Identifier: Apache-2.0
"""The module of chunked Kimi delta attention: for SM90. Elsewhere prefill goes token by token (kda_step.py)."""

from __future__ import annotations

from typing import Iterator

from ...compilation_context import sm90a_nvcc_flags
from ..attention.generate import has_hopper_target
from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_kda_prefill_module", "gen_kda_prefill_modules"]


def gen_kda_prefill_module() -> JitSpec:
    """Describe the module."""
    return stage(
        "kda_prefill",
        backend="cuda",
        name="kda_prefill_sm90",
        kernels={
            "first": {"part": "first"},
            "halves": {"part": "halves", "shape": "KdaShape<1>"},
            "heads": {"part": "heads", "shape": "KdaShape<2>"},
        },
        extra_cuda_cflags=sm90a_nvcc_flags,
    )


def gen_kda_prefill_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules of this part of the family."""
    if backend == "cuda" and has_hopper_target():
        yield gen_kda_prefill_module()
