# SPDX-License-Identifier: Apache-2.0
"""Operands, scales and comparison of block-scaled products."""

from __future__ import annotations

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16


def fp8(*shape: int, device: str, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def factors(*shape: int, device: str) -> torch.Tensor:
    """Make scales that are no powers of two."""
    return torch.rand(shape, device=device) * 1.5 + 0.5


def scale_of(x: torch.Tensor, rows: int, depth: int, major: str) -> torch.Tensor:
    *batch, m, k = x.shape
    blocks = (-(-m // rows), -(-k // depth))
    return factors(*batch, *(blocks if major == "K" else blocks[::-1]), device=x.device)


def poisoned(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=device, dtype=dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-2) -> None:
    """Compare to one rounding of the result; sums may differ by their order.

    The tensor cores of SM90 keep 13 bits of a sum of 8-bit products, relative to its largest term.
    """
    if actual.is_cuda and expected.numel() > 0:
        atol = max(atol, 2**-12 * float(expected.float().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=atol)
