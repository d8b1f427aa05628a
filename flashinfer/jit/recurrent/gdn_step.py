# SPDX-License-Identifier: Apache-2.0
"""The module of the gated delta rule token by token: decode, verification, replay, rings."""

from __future__ import annotations

from typing import Iterator

from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_gdn_step_module", "gen_gdn_step_modules"]

# Types of tokens and of states; states of float16 are those of rings.
_DTYPES = ("bfloat16_t", "float16_t")
_STATES = ("float", "bfloat16_t", "float16_t", "k_major")


def gen_gdn_step_module(backend: str = "cuda") -> JitSpec:
    """Describe the module; types of tokens and states are dispatched inside."""
    units = {f"{dtype}_{state}": {"dtype": dtype, "state": state} for dtype in _DTYPES for state in _STATES}
    return stage("gdn_step", backend=backend, kernels=units)


def gen_gdn_step_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules of this part of the family."""
    yield gen_gdn_step_module(backend)
