# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that several references share; its source travels with each definition that uses it."""

from __future__ import annotations

import torch

__all__ = ["normalize", "to_fp8"]


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension. Of a centred x, this is LayerNorm's biased variance."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturate, then round to nearest even; torch alone would turn an overflow into NaN or infinity."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)
