# SPDX-License-Identifier: Apache-2.0
"""The module of Kimi delta attention token by token, with the convolution and the norm around a step."""

from __future__ import annotations

from typing import Iterator

from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_kda_step_module", "gen_kda_step_modules"]


def gen_kda_step_module(backend: str = "cuda") -> JitSpec:
    """Describe the module; types of states are dispatched inside."""
    return stage(
        "kda_step", backend=backend, kernels={unit: {"state": unit} for unit in ("float", "bfloat16_t", "layer")}
    )


def gen_kda_step_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules of this part of the family."""
    yield gen_kda_step_module(backend)
