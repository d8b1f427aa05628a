# SPDX-License-Identifier: Apache-2.0
"""Rows to select from: smooth ones, and adversarial ones for selection by sampling or by histograms."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = float("inf")


def _normal(rows: int, n: int) -> torch.Tensor:
    return torch.randn(rows, n)


def _few_values(rows: int, n: int) -> torch.Tensor:
    return (2 * torch.randn(rows, n)).round()


def _masked(rows: int, n: int) -> torch.Tensor:
    return torch.randn(rows, n).masked_fill(torch.rand(rows, n) < 0.95, -INF)


def _zeros_of_both_signs(rows: int, n: int) -> torch.Tensor:
    x = torch.randn(rows, n)
    return torch.where(torch.rand(rows, n) < 0.3, x, torch.where(torch.rand(rows, n) < 0.5, 0.0, -0.0))


def _extremes(rows: int, n: int) -> torch.Tensor:
    x = torch.randn(rows, n) * 1e-40
    x[:, ::7], x[:, 1::11] = INF, -INF
    x[:, 2::13] = 60000.0
    return x


def _with_nan(rows: int, n: int) -> torch.Tensor:
    x = torch.randn(rows, n)
    return x.masked_fill(torch.rand(rows, n) < 0.02, torch.nan)


def _sampled(rows: int, n: int) -> torch.Tensor:
    """Return rows that are large only at the columns that the CPU samples, so that its estimate is too high."""
    x = torch.randn(rows, n)
    x[:, torch.arange(2048) * n // 2048] += 20
    return x


KINDS = {
    "normal": _normal,
    "few values": _few_values,
    "masked": _masked,
    "zeros": _zeros_of_both_signs,
    "extremes": _extremes,
    "nan": _with_nan,
    "sampled": _sampled,
    "equal": lambda rows, n: torch.full((rows, n), 3.0),
    "all -inf": lambda rows, n: torch.full((rows, n), -INF),
    "all nan": lambda rows, n: torch.full((rows, n), torch.nan),
    "ascending": lambda rows, n: torch.arange(n).float().expand(rows, n) / n,
    "descending": lambda rows, n: -torch.arange(n).float().expand(rows, n) / n,
    "outlier": lambda rows, n: torch.randn(rows, n).index_fill(1, torch.tensor([n // 2]), 30000.0),
}


def make(kind: str, rows: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return KINDS[kind](rows, n).to(dtype).contiguous().to(device)
