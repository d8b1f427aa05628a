# SPDX-License-Identifier: Apache-2.0
"""Operands and float64 references of the GEMM tests."""

from __future__ import annotations

from typing import Optional

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Unit roundoff of a result in its dtype. Sums in float32 add less than 1e-6 of the sum of magnitudes.
ROUNDOFF = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24}


def operand(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def block_scales(x: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """Make scales between 0.5 and 2 for blocks of ``rows`` by ``depth`` elements of a matrix or of each of a batch."""
    *batch, m, k = x.shape
    return torch.rand(*batch, -(-m // rows), -(-k // depth), device=x.device) * 1.5 + 0.5


def dequantized(x: torch.Tensor, scale: Optional[torch.Tensor] = None, rows: int = 1, depth: int = 1) -> torch.Tensor:
    """Return ``x`` in float64, times the scale of the tensor or of its blocks."""
    x = x.double()
    if scale is None:
        return x
    scale = scale.double()
    if scale.numel() > 1:
        scale = scale.repeat_interleave(rows, -2).repeat_interleave(depth, -1)[..., : x.shape[-2], : x.shape[-1]]
    return x * scale


#: Error of a sum of 8-bit products on the tensor cores of SM90, which keep 13 bits, relative to the sum of magnitudes.
SUM_OF_13_BITS = 2.0**-14


def check(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: float | torch.Tensor = 0.0, sum_error: float = 1e-6
) -> None:
    """Compare ``out`` with ``a @ b.mT + bias`` of float64 operands: rounded once, after a sum in float32.

    ``sum_error`` is the error of the sum, relative to the sum of magnitudes.
    """
    expected = a @ b.mT + bias
    magnitudes = a.abs() @ b.abs().mT + abs(bias)
    allowed = expected.abs() * ROUNDOFF[out.dtype] + magnitudes * sum_error + 1e-7
    excess = (out.double() - expected).abs() / allowed
    assert not excess.isnan().any()
    assert excess.numel() == 0 or excess.max() <= 1, f"error is {excess.max():.2f} of the bound"
