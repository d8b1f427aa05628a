# SPDX-License-Identifier: Apache-2.0
"""Blockwise e4m3 quantisation for tests: every tile of a tensor shares one fp32 scale."""

from __future__ import annotations

from typing import Sequence

import torch

from .._runtime.errors import ArgumentError

__all__ = ["dequantize_fp8", "per_block_cast_to_fp8", "per_token_cast_to_fp8", "quantize_fp8"]

_BLOCK = 128
_SMALLEST_AMAX = 1e-4  # an all-zero tile would divide by zero


def _split(x: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    """View ``(a, b)`` as ``(a/ta, ta, b/tb, tb)``, for any rank."""
    shape = [part for size, step in zip(x.shape, tile, strict=True) for part in (size // step, step)]
    return x.reshape(shape)


def _quantize(x: torch.Tensor, tile: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and a scale per tile: ``amax / 448`` rounded up to a power of two (so multiplying is exact)."""
    tiles = _split(x.float(), tile)
    inside = list(range(1, 2 * x.ndim, 2))
    amax = tiles.abs().amax(dim=inside, keepdim=True).clamp(min=_SMALLEST_AMAX)
    scale = torch.exp2(torch.ceil(torch.log2(amax / torch.finfo(torch.float8_e4m3fn).max)))
    return (tiles / scale).to(torch.float8_e4m3fn).reshape(x.shape), scale.squeeze(inside)


def _check_major_mode(op: str, scale_major_mode: str) -> None:
    if scale_major_mode not in ("K", "MN"):
        raise ArgumentError(f"{op}: scale_major_mode must be 'K' or 'MN', got {scale_major_mode!r}")


def quantize_fp8(
    x: torch.Tensor, scale_shape: Sequence[int], tile_shape: Sequence[int], scale_major_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` to e4m3, one fp32 scale per tile.

    Parameters
    ----------
    x : torch.Tensor
        ``(m, k)`` or ``(batch, n, k)``.
    scale_shape : sequence of int
        Expected shape of the scales: tiles per dimension, the last two swapped in mode ``"MN"``.
    tile_shape : sequence of int
        Elements of one tile in each dimension; divides ``x.shape``.
    scale_major_mode : str
        ``"K"``: scales ``(m/tm, k/tk)``; ``"MN"``: ``(k/tk, m/tm)``.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        e4m3 values shaped like ``x`` and fp32 scales; ``values * scale`` approximates ``x``.
    """
    _check_major_mode("quantize_fp8", scale_major_mode)
    if x.ndim != len(tile_shape) or any(size % step for size, step in zip(x.shape, tile_shape, strict=True)):
        raise ArgumentError(f"quantize_fp8: tile_shape must divide x.shape = {tuple(x.shape)}, got {tuple(tile_shape)}")
    values, scale = _quantize(x, tile_shape)
    if scale_major_mode == "MN":
        scale = scale.transpose(-1, -2).contiguous()
    if tuple(scale.shape) != tuple(scale_shape):
        raise ArgumentError(
            f"quantize_fp8: scale_shape must be {tuple(scale.shape)} (x.shape / tile_shape), got {tuple(scale_shape)}"
        )
    return values, scale


def dequantize_fp8(x: torch.Tensor, x_scale: torch.Tensor, scale_major_mode: str) -> torch.Tensor:
    """fp32 values of what :func:`quantize_fp8` returned; the tile follows from the two shapes."""
    _check_major_mode("dequantize_fp8", scale_major_mode)
    scale = x_scale.transpose(-1, -2) if scale_major_mode == "MN" else x_scale
    tile = [size // count for size, count in zip(x.shape, scale.shape, strict=True)]
    spread = scale.reshape([part for count in scale.shape for part in (count, 1)])
    return (_split(x.float(), tile) * spread).reshape(x.shape)


def _cast(x: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a matrix with zeros to whole tiles, quantise, and cut the padding off again."""
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x, (0, -cols % tile[1], 0, -rows % tile[0]))
    values, scale = _quantize(padded, tile)
    return values[:rows, :cols].contiguous(), scale


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of ``(m, k)`` and fp32 scales ``(m, ceil(k / 128))``: one per row and 128 columns."""
    return _cast(x, (1, _BLOCK))


def per_block_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of ``(n, k)`` and fp32 scales ``(ceil(n / 128), ceil(k / 128))``: one per 128 x 128 block."""
    return _cast(x, (_BLOCK, _BLOCK))
