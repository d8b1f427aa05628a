# SPDX-License-Identifier: Apache-2.0
"""Inputs that the rope tests share."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def randn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def view_of_wider(x: torch.Tensor, pad: int = 3, offset: int = 1) -> torch.Tensor:
    """The same values as columns of a wider buffer. The odd defaults leave no row aligned to more than an element."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), 7.0, device=x.device).to(x.dtype)
    view = wide[..., offset : offset + x.shape[-1]]
    view.copy_(x)
    return view


def gaps_are_untouched(view: torch.Tensor) -> bool:
    """Whether the columns around a ``view_of_wider`` still hold what it put there."""
    wide = view._base
    return int((wide.float() == 7.0).sum()) >= wide.numel() - view.numel()


def table(rotary_dim: int, rows: int, device: str) -> torch.Tensor:
    """Cosines and sines of the usual frequencies."""
    frequency = 1e4 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(rows)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def ragged(lengths: list[int], device: str, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """Requests of these lengths, each at some position."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    offsets = torch.randint(0, 1000, (len(lengths),))
    return {"indptr": ends.to(device, dtype), "offsets": offsets.to(device, dtype)}


def quantize_inputs(
    nnz: int, heads: int, kv_heads: int, rope_dim: int, nope_dim: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Of a call with fp8 output; 0 key heads is MLA: one head, without a dimension for it."""
    k = (nnz, kv_heads) if kv_heads else (nnz,)
    return {
        "q_rope": randn(nnz, heads, rope_dim, dtype=dtype, device=device),
        "k_rope": randn(*k, rope_dim, dtype=dtype, device=device),
        "q_nope": randn(nnz, heads, nope_dim, dtype=dtype, device=device) if nope_dim else None,
        "k_nope": randn(*k, nope_dim, dtype=dtype, device=device) if nope_dim else None,
        "cos_sin_cache": table(rope_dim, 128, device),
        "pos_ids": torch.randint(0, 128, (nnz,), device=device),
    }
