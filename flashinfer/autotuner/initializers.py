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
    """Return uniform numbers from 0 to 1.

    Examples
    --------
    >>> x = flashinfer.autotuner.autotuner_initializer_rand((2, 3), torch.bfloat16, "cpu")
    >>> x.shape, x.dtype, bool((x >= 0).all() and (x <= 1).all())
    (torch.Size([2, 3]), torch.bfloat16, True)
    """
    return torch.rand(shapes, device=device).to(dtype)


def autotuner_initializer_rand_scaled(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Return uniform numbers from -5 to 5; from 0 to 5 for unsigned dtypes; True or False for bool.

    Examples
    --------
    >>> x = flashinfer.autotuner.autotuner_initializer_rand_scaled((64,), torch.uint8, "cpu")
    >>> x.dtype, int(x.max()) <= 5
    (torch.uint8, True)
    """
    numbers = torch.rand(shapes, device=device) * 10 - 5
    if dtype is torch.bool:
        return numbers > 0
    return (numbers.abs() if not dtype.is_signed else numbers).to(dtype)
