# SPDX-License-Identifier: Apache-2.0
"""Block scales of e4m3 matrices, for the references of ``flashinfer.gemm``."""

from __future__ import annotations

import torch

from .shared import to_fp8

__all__ = ["spread_scales", "to_e4m3_blocks"]


def to_e4m3_blocks(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of (n, k) and scales (ceil(n / rows), k / 128): code = x * 448 / amax, scale = amax / 448."""
    n, k = x.shape
    count = (n + rows - 1) // rows
    padded = torch.zeros(count * rows, k, dtype=torch.float32, device=x.device)
    padded[:n] = x
    blocks = padded.view(count, rows, k // 128, 128)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # Both operands of the division are tensors: torch divides a number by multiplying with the reciprocal.
    factor = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)
    codes = to_fp8(blocks * factor, torch.float8_e4m3fn).view(count * rows, k)[:n]
    return codes, factor.reciprocal().view(count, k // 128)


def spread_scales(scales: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Repeat (rows or ceil(rows / 128), ceil(k / 128)) scales to (rows, k)."""
    each = 1 if scales.shape[0] == rows else 128
    return scales.repeat_interleave(each, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :k]
