# SPDX-License-Identifier: Apache-2.0
"""Calls of norms for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..guard_pages import Draw
from ..traced_calls import traced

_ROWS = {"batch_size": (0, 1, 3, 17), "hidden_size": (1, 8, 13, 64, 257, 1024)}


def _out(draw: Draw, made: dict[str, Any]) -> dict[str, Any]:
    return {"out": torch.empty_like(made["input"])} if draw.chance(0.3) else {}


CALLS = {
    "rmsnorm": traced(flashinfer.rmsnorm, more=_out, **_ROWS),
    "gemma_rmsnorm": traced(flashinfer.gemma_rmsnorm, more=_out, **_ROWS),
    "fused_add_rmsnorm": traced(flashinfer.fused_add_rmsnorm, **_ROWS),
    "gemma_fused_add_rmsnorm": traced(flashinfer.gemma_fused_add_rmsnorm, **_ROWS),
    "rmsnorm_quant": traced(flashinfer.norm.rmsnorm_quant, **_ROWS),
    "fused_add_rmsnorm_quant": traced(flashinfer.norm.fused_add_rmsnorm_quant, **_ROWS),
    "layernorm": traced(flashinfer.layernorm, **_ROWS),
    "layernorm_quant": traced(flashinfer.norm.layernorm_quant, **_ROWS),
}
