# SPDX-License-Identifier: Apache-2.0
"""The module of the sampling family: one per backend."""

from __future__ import annotations

from typing import Any, Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_sampling_module", "gen_sampling_modules"]


def _units() -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernel units, each small enough to compile in a few seconds."""
    for header in ("top", "stream", "table", "softmax", "speculative"):
        yield header, {"header": header, "instances": []}
    for dtype in ("float", "float16_t", "bfloat16_t"):
        for function in ("RenormRows", "MaskRows"):
            instances = [f"{function}<{dtype}>(const RowParams<{dtype}>&, Stream)"]
            yield f"{function}_{dtype}", {"header": "rows", "instances": instances}


def gen_sampling_module(backend: str = "cuda") -> JitSpec:
    """Draws, renormalisation, masks, softmax."""
    return stage("sampling", backend=backend, kernels=dict(_units()))


def gen_sampling_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """What AOT pre-builds and what a warm-up of the family loads."""
    yield gen_sampling_module(backend)
