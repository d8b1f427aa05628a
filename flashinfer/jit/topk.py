# SPDX-License-Identifier: Apache-2.0
"""The module of the topk family: one per backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_topk_module", "gen_topk_modules"]


def gen_topk_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of top-k selection from rows and from windows of rows."""
    return stage("topk", backend=backend, kernels={t: {"dtype": t} for t in ("float16_t", "bfloat16_t", "float")})


def gen_topk_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_topk_module(backend)
