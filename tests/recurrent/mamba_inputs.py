# SPDX-License-Identifier: Apache-2.0
"""Inputs of the tests of Mamba, as engines pass them."""

from __future__ import annotations

from typing import Any, Sequence

import torch


def tied(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Expand one number for each head, with strides of 0."""
    return values.reshape(*values.shape, *(1 for _ in sizes)).expand(*values.shape, *sizes)


def weights(
    heads: int, dim: int, dstate: int, device: str, dtype: torch.dtype = torch.bfloat16, is_tied: bool = True
) -> dict[str, torch.Tensor]:
    """Return A, D and dt_bias, of each head or of each row."""
    if is_tied:
        return {
            "A": tied(-torch.exp(torch.randn(heads, device=device)), dim, dstate),
            "D": tied(torch.randn(heads, device=device).to(dtype), dim),
            "dt_bias": tied((0.5 * torch.randn(heads, device=device)).to(dtype), dim),
        }
    return {
        "A": -torch.exp(torch.randn(heads, dim, dstate, device=device)),
        "D": torch.randn(heads, dim, device=device).to(dtype),
        "dt_bias": (0.5 * torch.randn(heads, dim, device=device)).to(dtype),
    }


def tokens(
    lead: Sequence[int],
    heads: int,
    dim: int,
    groups: int,
    dstate: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    dt_dtype: torch.dtype = torch.bfloat16,
    is_tied: bool = True,
) -> dict[str, torch.Tensor]:
    """Return x, dt, B and C; dt expanded over the rows of a head, or with a number for each."""
    dt = torch.randn(*lead, heads, *(() if is_tied else (dim,)), device=device).to(dt_dtype)
    return {
        "x": torch.randn(*lead, heads, dim, device=device).to(dtype),
        "dt": tied(dt, dim) if is_tied else dt,
        "B": torch.randn(*lead, groups, dstate, device=device).to(dtype),
        "C": torch.randn(*lead, groups, dstate, device=device).to(dtype),
    }


def pool(slots: int, heads: int, dim: int, dstate: int, dtype: torch.dtype, device: str, gap: int = 0) -> torch.Tensor:
    """Return states of a pool; ``gap`` numbers between slots belong to something else and must keep their sevens."""
    size = heads * dim * dstate
    if dtype == torch.int16:
        memory = torch.randint(-9000, 9000, (slots, size + gap), device=device, dtype=dtype)
    else:
        memory = torch.randn(slots, size + gap, device=device).to(dtype)
    memory[:, size:] = 7
    return memory[:, :size].view(slots, heads, dim, dstate)


def gap_is_untouched(state: torch.Tensor) -> bool:
    base = state._base
    return bool((base.view(state.shape[0], -1)[:, state[0].numel() :] == 7).all())


def slots(*numbers: int, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


def doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a reference in float64: copies, because references write."""

    def wide(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.double() if x.dtype.is_floating_point and x.dtype != torch.float8_e4m3fn else x.clone()

    return {name: wide(x) for name, x in arguments.items()}
