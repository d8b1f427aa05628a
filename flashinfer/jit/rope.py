# SPDX-License-Identifier: Apache-2.0
"""The module of the rope family: one per backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_rope_module", "gen_rope_modules"]


def gen_rope_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of rotary position embedding in all its forms."""
    return stage("rope", backend=backend, kernels={t: {"dtype": t} for t in ("float16_t", "bfloat16_t", "float")})


def gen_rope_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_rope_module(backend)
