# SPDX-License-Identifier: Apache-2.0
"""Calls of the SM90 GEMM modules, and references in float64."""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer.jit.gemm import get_gemm_sm90_module

BATCHED, CONTIGUOUS, MASKED, PACKED = range(4)
E4M3 = torch.float8_e4m3fn


def gemm(
    kind: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    scales: tuple[Optional[torch.Tensor], Optional[torch.Tensor]] = (None, None),
    bias: Optional[torch.Tensor] = None,
    groups: Optional[torch.Tensor] = None,
    weight_indices: Optional[torch.Tensor] = None,
    grouping: int = BATCHED,
    expected_m: int = 0,
    tile: int = -1,
    cluster: int = 1,
    share_b: int = 0,
    raster: int = 0,
    blocks: int = 0,
    pdl: bool = False,
    weights_first: bool = False,
) -> torch.Tensor:
    """Call the module of ``kind``; a negative tile lets the module choose."""
    module = get_gemm_sm90_module(kind)
    scale_rows = 1 if scales[1] is None or scales[1].shape[-2:-1] == b.shape[-2:-1] else 128
    operands = (out, a, b, *scales, bias, groups, weight_indices, grouping, scale_rows)
    assert module.gemm_sm90(*operands, expected_m, tile, cluster, share_b, raster, blocks, pdl, weights_first)
    return out


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def operands(kind: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, E4M3)
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def block_scales(a: torch.Tensor, b: torch.Tensor, per_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Make scales between 0.5 and 2 for rows of ``a`` (K-block major, as the quantiser writes) and blocks of ``b``."""
    *batch, m, k = a.shape
    padded = torch.rand(*batch, -(-k // 128), -(-m // 4) * 4, device="cuda") * 1.5 + 0.5
    *batch, n, k = b.shape
    rows = n if per_row else -(-n // 128)
    return padded[..., :m].transpose(-1, -2), torch.rand(*batch, rows, -(-k // 128), device="cuda") * 1.5 + 0.5


def dequantized(x: torch.Tensor, scale: Optional[torch.Tensor]) -> torch.Tensor:
    """Return ``x`` in float64, times the scales of its blocks."""
    x = x.double()
    if scale is None:
        return x
    rows, k = x.shape[-2:]
    repeat = 1 if scale.shape[-2] == rows else 128
    wide = scale.double().repeat_interleave(repeat, -2).repeat_interleave(128, -1)
    return x * wide[..., :rows, :k]


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm; NaN stays NaN."""
    return ((out.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


#: bf16 results of exact sums have a relative error of 2^-9 / sqrt(3), half of that on average over mantissas.
TOLERANCE = 2.5e-3
