# SPDX-License-Identifier: Apache-2.0
"""The module of the shift family: one per backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_shift_module", "gen_shift_modules"]


def gen_shift_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of ``shift``; nothing is built here."""
    return stage("shift", backend=backend, kernels={t: {"dtype": t} for t in ("float16_t", "bfloat16_t", "float")})


def gen_shift_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_shift_module(backend)
