# SPDX-License-Identifier: Apache-2.0
"""Tensors of a trial: each function makes one from a shape, a dtype and a device."""

from __future__ import annotations

from typing import Any, Sequence

import torch

__all__ = [
    "autotuner_initializer_empty",
    "autotuner_initializer_ones",
    "autotuner_initializer_rand",
    "autotuner_initializer_rand_scaled",
    "autotuner_initializer_randn",
    "autotuner_initializer_zeros",
]


def autotuner_initializer_empty(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty(shapes, dtype=dtype, device=device)


def autotuner_initializer_zeros(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.zeros(shapes, device=device).to(dtype)


def autotuner_initializer_ones(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.ones(shapes, device=device).to(dtype)


def autotuner_initializer_randn(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.randn(shapes, device=device).to(dtype)


def autotuner_initializer_rand(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Uniform numbers from 0 to 1."""
    return torch.rand(shapes, device=device).to(dtype)


def autotuner_initializer_rand_scaled(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Uniform numbers from -5 to 5; from 0 to 5 for unsigned dtypes; True or False for bool."""
    numbers = torch.rand(shapes, device=device) * 10 - 5
    if dtype is torch.bool:
        return numbers > 0
    return (numbers.abs() if not dtype.is_signed else numbers).to(dtype)
