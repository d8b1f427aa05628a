# SPDX-License-Identifier: Apache-2.0
"""Inputs that the rope tests share."""

from __future__ import annotations

from typing import Any

import torch

from ..tensors import randn

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def table(rotary_dim: int, rows: int, device: str) -> torch.Tensor:
    """Return cosines and sines of the usual frequencies."""
    frequency = 1e4 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(rows)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def ragged(lengths: list[int], device: str, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """Return requests of these lengths, each at some position."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    offsets = torch.randint(0, 1000, (len(lengths),))
    return {"indptr": ends.to(device, dtype), "offsets": offsets.to(device, dtype)}


def quantize_inputs(
    nnz: int, heads: int, kv_heads: int, rope_dim: int, nope_dim: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Return the inputs of a call with fp8 output; 0 key heads means MLA: one key head, without a head dimension."""
    k = (nnz, kv_heads) if kv_heads else (nnz,)
    return {
        "q_rope": randn(nnz, heads, rope_dim, dtype=dtype, device=device),
        "k_rope": randn(*k, rope_dim, dtype=dtype, device=device),
        "q_nope": randn(nnz, heads, nope_dim, dtype=dtype, device=device) if nope_dim else None,
        "k_nope": randn(*k, nope_dim, dtype=dtype, device=device) if nope_dim else None,
        "cos_sin_cache": table(rope_dim, 128, device),
        "pos_ids": torch.randint(0, 128, (nnz,), device=device),
    }
