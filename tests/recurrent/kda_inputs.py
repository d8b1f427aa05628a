# SPDX-License-Identifier: Apache-2.0
"""Tensors of Kimi delta attention, and the forms of its gate."""

from __future__ import annotations

import torch

from .gdn_inputs import BF16

GATES = {
    "log decay": {},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0, "beta_is_logit": True},
}


def inputs(batch: int, tokens: int, heads: int = 2, value_heads: int = 2, dim: int = 128, *, device: str) -> dict:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    return {
        "q": randn(batch, tokens, heads, dim).to(BF16),
        "k": randn(batch, tokens, heads, dim).to(BF16),
        "v": randn(batch, tokens, value_heads, dim).to(BF16),
        "g": -randn(batch, tokens, value_heads, dim).abs().to(BF16),
        "beta": torch.rand(batch, tokens, value_heads, device=device).to(BF16),
        "A_log": randn(value_heads),
        "dt_bias": randn(value_heads * dim),
    }
