# SPDX-License-Identifier: Apache-2.0
"""Shared inputs of the rotary embedding benchmarks: positions, a cos/sin table, and the rotation written in torch."""

from __future__ import annotations

import torch

__all__ = ["position_table", "random_positions", "rotated"]

MAX_POSITION = 32768


def position_table(rotary_dim: int) -> torch.Tensor:
    angle = torch.arange(MAX_POSITION)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def random_positions(nnz: int) -> torch.Tensor:
    return torch.randint(0, MAX_POSITION, (nnz,), dtype=torch.int32)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` as model code does in torch: in the dtype of x, with cosines and sines repeated for both halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
