# SPDX-License-Identifier: Apache-2.0
"""Parts of the references of sampling: random numbers, filters, a draw. All in float64, by sorting."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

__all__ = ["draw_columns", "keep_top_k", "keep_top_p", "random_units", "same_shapes"]

Parameter = Union[torch.Tensor, float]


def as_column(value: Parameter, rows: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, device=rows.device).reshape(-1, 1)


def multiply_words(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the product of 32-bit numbers, which int64 cannot hold in one piece."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return (middle >> 16) & 0xFFFFFFFF, ((middle << 16) | (low & 0xFFFF)) & 0xFFFFFFFF


def random_words(seed: Parameter, offset: Parameter, rows: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10 with key ``seed`` and counter ``(offset, row)``."""
    key = torch.as_tensor(seed, device=rows.device).long().expand(rows.shape)
    at = torch.as_tensor(offset, device=rows.device).long().expand(rows.shape)
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    c = [at & 0xFFFFFFFF, (at >> 32) & 0xFFFFFFFF, rows & 0xFFFFFFFF, (rows >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        high_a, low_a = multiply_words(0xD2511F53, c[0])
        high_b, low_b = multiply_words(0xCD9E8D57, c[2])
        c = [high_b ^ c[1] ^ k0, low_b, high_a ^ c[3] ^ k1, low_a]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def random_units(seed: Optional[Parameter], offset: Optional[Parameter], rows: torch.Tensor) -> torch.Tensor:
    """A number of (0, 1] for each row; torch's own without a seed."""
    if seed is None or offset is None:
        return 1 - torch.rand(rows.shape, dtype=torch.float64, device=rows.device)
    words = random_words(seed, offset, rows)
    return (words[1].double() * 2.0**32 + words[0].double() + 1) / 2.0**64


def draw_columns(weights: torch.Tensor, units: torch.Tensor, normalise: bool = True) -> torch.Tensor:
    """The first column at which the running sum reaches the unit's share; the last positive one if none does."""
    weights = torch.nan_to_num(weights.double(), nan=0.0).clamp(min=0)
    sums = weights.cumsum(dim=-1)
    targets = units * sums[..., -1] if normalise else units
    found = torch.searchsorted(sums, targets.unsqueeze(-1).contiguous()).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).int().flip(-1).argmax(dim=-1)
    found = torch.where(found < weights.shape[-1], found, last)
    return torch.where(sums[..., -1] > 0, found, 0)


def keep_top_k(x: torch.Tensor, top_k: Parameter, fill: float = 0.0) -> torch.Tensor:
    """Keep the values that are at least the k-th largest of their row."""
    k = as_column(top_k, x).long().clamp(1, x.shape[-1]).expand(x.shape[0], 1)
    threshold = x.sort(dim=-1, descending=True).values.gather(1, k - 1)
    return torch.where(x >= threshold, x, fill)


def keep_top_p(probs: torch.Tensor, top_p: Parameter) -> torch.Tensor:
    """Columns above which there is less than top_p."""
    probs = torch.nan_to_num(probs.double(), nan=0.0).clamp(min=0)
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    limit = as_column(top_p, probs).double()
    wanted = (before < limit) | (limit >= 1)
    wanted[:, 0] = True
    threshold = ordered.masked_fill(~wanted, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(probs >= threshold, probs, 0)


def same_shapes(reference_outputs: Any, actual_outputs: Any, **_: Any) -> bool:
    """Two draws need not agree, unless both were given seed and offset."""
    if isinstance(reference_outputs, dict):
        return all(same_shapes(value, actual_outputs[name]) for name, value in reference_outputs.items())
    if isinstance(reference_outputs, (tuple, list)):
        return all(same_shapes(*pair) for pair in zip(reference_outputs, actual_outputs, strict=True))
    return reference_outputs.shape == actual_outputs.shape
