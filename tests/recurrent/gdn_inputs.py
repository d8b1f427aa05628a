# SPDX-License-Identifier: Apache-2.0
"""Arguments of the functions of the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def projections(
    batch: int,
    tokens: int,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    dtype: torch.dtype = BF16,
    device: str,
) -> dict[str, torch.Tensor]:
    """Return q, k, v and the gates by the names that all functions share."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    return {
        "q": randn(batch, tokens, heads, key_dim).to(dtype),
        "k": randn(batch, tokens, heads, key_dim).to(dtype),
        "v": randn(batch, tokens, value_heads, value_dim).to(dtype),
        "A_log": randn(value_heads),
        "a": randn(batch, tokens, value_heads).to(dtype),
        "dt_bias": randn(value_heads),
        "b": randn(batch, tokens, value_heads).to(dtype),
    }


def states(
    count: int,
    value_heads: int = 4,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    dtype: torch.dtype = FP32,
    device: str,
    pad: int = 0,
) -> torch.Tensor:
    """Return a pool ``[count, HV, V, K]`` whose slots are ``pad`` elements further apart than they need to be."""
    size = value_heads * value_dim * key_dim
    pages = torch.randn(count, size + pad, device=device).to(dtype)
    return pages[:, :size].view(count, value_heads, value_dim, key_dim)


def ints(values: Any, dtype: torch.dtype = torch.int32, *, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
