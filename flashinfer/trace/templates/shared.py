# SPDX-License-Identifier: Apache-2.0
"""Parts of several templates; the source travels with each definition that uses it."""

from __future__ import annotations

from typing import Any

import torch

from ..check import default_check

__all__ = ["even_indptr", "fp8_check", "normal", "normalize", "randint", "seeded", "to_fp8"]


def seeded(seed: int, device: Any) -> torch.Generator:
    """The random numbers of an init function."""
    return torch.Generator(device=device).manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def randint(generator: torch.Generator, high: int, *shape: int, low: int = 0) -> torch.Tensor:
    """Integers of ``[low, high)``, int32."""
    return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=torch.int32)


def even_indptr(total: int, parts: int, device: Any) -> torch.Tensor:
    """Return the begin of each of ``parts`` parts of about the same size, then the total."""
    return torch.tensor([total * i // parts for i in range(parts + 1)], dtype=torch.int32, device=device)


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension. Of a centred x, this is LayerNorm's biased variance."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturate, then round to nearest even; torch alone would turn an overflow into NaN or infinity."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def fp8_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    max_mismatch_pct: float = 1.0,
    min_cos_sim: Any = None,
    **tolerances: Any,
) -> bool:
    # A value near the middle of two fp8 neighbours may fall to either side; a neighbour is up to 12.5 % away.
    limits = {"max_mismatch_pct": max_mismatch_pct, "min_cos_sim": min_cos_sim, **tolerances}
    return default_check(reference_outputs, actual_outputs, **limits)
