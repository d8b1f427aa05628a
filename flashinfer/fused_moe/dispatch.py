# SPDX-License-Identifier: Apache-2.0
"""Decisions about kernels of mixture-of-experts layers that the environment can change."""

from __future__ import annotations

from dataclasses import dataclass

from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs

__all__ = ["B12xPlan", "block_tokens", "plan_b12x_moe"]

_BLOCK_TOKENS = 4  # MOE_ROUTE_MAX_BLOCK_TOKENS of moe/route.h
_SM12X = (120, 121)
_MICRO_TOKENS = 16  # a micro batch: what one tile of rows holds


def block_tokens() -> int:
    """Return the tokens of a block of the routing kernel; ``FLASHINFER_ROUTING_FORCE_BLOCK_PER_TOKEN`` forces one."""
    return 1 if knobs.routing_force_block_per_token else _BLOCK_TOKENS


@dataclass(frozen=True)
class B12xPlan:
    """Kernel that a MoE call on SM12x would run.

    ``path`` has the types: ``"nvfp4"`` or ``"w4a16"``. ``share_input``: experts share a tile of input.
    """

    path: str
    share_input: bool


def plan_b12x_moe(arch: int, num_tokens: int, path: str = "nvfp4") -> B12xPlan:
    """Decide for SM120 and SM121, whose kernels this package does not have: errors name the decision.

    ``FLASHINFER_B12X_FORCE_MOE_W4A16`` forces bfloat16 activations; micro batches share their input unless
    ``FLASHINFER_B12X_MICRO_SHARE_INPUT`` is 0.
    """
    if arch not in _SM12X:
        raise ArgumentError(f"plan_b12x_moe: arch must be 120 or 121, got {arch}")
    if path not in ("nvfp4", "w4a16"):
        raise ArgumentError(f"plan_b12x_moe: path must be 'nvfp4' or 'w4a16', got {path!r}")
    is_micro = num_tokens <= _MICRO_TOKENS
    return B12xPlan("w4a16" if knobs.b12x_force_moe_w4a16 else path, is_micro and knobs.b12x_micro_share_input)
