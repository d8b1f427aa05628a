# SPDX-License-Identifier: Apache-2.0
"""Calls of gated activations for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..guard_pages import Draw
from ..traced_calls import traced

_TOKENS = {"num_tokens": (0, 1, 3, 17), "hidden_size": (8, 16, 24, 64, 520, 2048)}


def _out(draw: Draw, made: dict[str, Any]) -> dict[str, Any]:
    x = made["input"]
    return {"out": x.new_empty(*x.shape[:-1], x.shape[-1] // 2)} if draw.chance(0.3) else {}


def _swiglu(rows: int, columns: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, columns).half(), "gate": torch.randn(rows, columns).half()}


CALLS = {
    "silu_and_mul": traced(flashinfer.silu_and_mul, more=_out, **_TOKENS),
    "gelu_and_mul": traced(flashinfer.gelu_and_mul, more=_out, **_TOKENS),
    "gelu_tanh_and_mul": traced(flashinfer.gelu_tanh_and_mul, more=_out, **_TOKENS),
    "swiglu": traced(flashinfer.swiglu, init=_swiglu, rows=(0, 1, 3, 17), columns=(1, 8, 13, 64, 520)),
}
