# SPDX-License-Identifier: Apache-2.0
"""Parts of the references of block-scaled formats: the place of a scale, and the values of bytes."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .shared import to_fp8

__all__ = ["dequantize", "e2m1_values", "mxfp8_blocks", "padded_scales", "random_bytes", "scale_index", "scale_values"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the three low bits; the fourth is the sign


def scale_index(rows: int, cols: int, layout: int, device: Any) -> torch.Tensor:
    """Place of each scale, (rows, cols), in layout 0 (tiles of 128 x 4), 1 (tiles of 8 x 4) or 2 (row by row)."""
    row, col = torch.arange(rows, device=device).unsqueeze(1), torch.arange(cols, device=device)
    padded = (cols + 3) // 4 * 4
    if layout == 0:
        tile, inside = row // 128 * 128 * padded + col // 4 * 512, row % 32 * 16 + row % 128 // 32 * 4
        return tile + inside + col % 4
    if layout == 1:
        return row // 8 * padded * 8 + col // 4 * 32 + row % 8 * 4 + col % 4
    return row * cols + col


def padded_scales(scales: torch.Tensor, layout: int) -> torch.Tensor:
    """A scale matrix in a layout: one-dimensional, zeros where tiles reach beyond it."""
    rows, cols = scales.shape
    tile = (128, 8, 1)[layout]
    size = (rows + tile - 1) // tile * tile * (cols if layout == 2 else (cols + 3) // 4 * 4)
    out = torch.zeros(size, dtype=scales.dtype, device=scales.device)
    out[scale_index(rows, cols, layout, scales.device)] = scales
    return out


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Two values from each byte of the last dimension, the low nibble first."""
    table = torch.tensor([sign * m for sign in (1.0, -1.0) for m in _E2M1], device=packed.device)
    codes = packed.view(torch.uint8).long()
    return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)]


def scale_values(scales: torch.Tensor, is_e4m3: bool) -> torch.Tensor:
    """e4m3 bytes as numbers, or 2^(byte - 127) with 255 for NaN."""
    if is_e4m3:
        return scales.view(torch.float8_e4m3fn).float()
    exponents = scales.view(torch.uint8).int()
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).int().view(torch.float32)


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, vec_size: int, layout: int, global_scale: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Values (rows, cols) times the scale of their block times the global one; ``scales`` are numbers in ``layout``."""
    rows, cols = values.shape
    each = scales.reshape(-1)[scale_index(rows, cols // vec_size, layout, scales.device)]
    out = values * each.repeat_interleave(vec_size, dim=1)
    return out if global_scale is None else out * global_scale.reshape(())


def mxfp8_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bytes (rows, cols) and scale bytes (rows, cols / 32): x / 2^(byte - 127), which is amax / 448 rounded up."""
    rows, cols = x.shape
    blocks = x.float().reshape(rows, cols // 32, 32)
    bits = (blocks.abs().amax(dim=-1) / 448).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa != 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    byte = (exponent + up.int()).clamp(max=254)
    inverse = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
    inverse = torch.where(byte == 0, 0, inverse).int().view(torch.float32)
    values = to_fp8(blocks * inverse.unsqueeze(-1), torch.float8_e4m3fn)
    return values.view(torch.uint8).reshape(rows, cols), byte.to(torch.uint8)


def random_bytes(*shape: int, device: Any, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device)
