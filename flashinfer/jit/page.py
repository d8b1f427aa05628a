# SPDX-License-Identifier: Apache-2.0
"""The modules of the page family: one that moves rows as bytes, one that quantises them on the way."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_page_module", "gen_page_modules", "gen_page_nvfp4_module"]


def gen_page_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that appends keys and values of any element type, and computes indices of a ragged batch."""
    return stage("page", backend=backend, kernels={"append": {}})


def gen_page_nvfp4_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that appends keys and values quantised to NVFP4."""
    units = {dtype: {"dtype": dtype} for dtype in ("float16_t", "bfloat16_t")}
    return stage("page_nvfp4", backend=backend, kernels=units)


def gen_page_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_page_module(backend)
    yield gen_page_nvfp4_module(backend)
