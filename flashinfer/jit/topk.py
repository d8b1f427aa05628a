# SPDX-License-Identifier: Apache-2.0
"""The module of the topk family: one per backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_topk_module", "gen_topk_modules"]


def gen_topk_module(backend: str = "cuda") -> JitSpec:
    """Top-k selection of rows and of windows of them."""
    return stage("topk", backend=backend, kernels={t: {"dtype": t} for t in ("float16_t", "bfloat16_t", "float")})


def gen_topk_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """What AOT pre-builds and what a warm-up of the family loads."""
    yield gen_topk_module(backend)
