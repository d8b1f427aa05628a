# SPDX-License-Identifier: Apache-2.0
"""Calls of fp8_ragged_mqa_logits for tests, and what is compared: scores within the ranges of the tokens."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.trace.templates.indexer import fp8_ragged_mqa_logits_trace

from .paged import check_scores, error_bound


def make(
    device: str, starts: list[int], ends: list[int], keys: int = 150, heads: int = 8, dim: int = 128
) -> dict[str, Any]:
    made = fp8_ragged_mqa_logits_trace.init(
        num_tokens=len(starts), num_heads=heads, head_dim=dim, num_keys=keys, device=device
    )
    made["k_starts"], made["k_ends"] = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends))
    return made


def seen_of(made: dict[str, Any]) -> torch.Tensor:
    place = torch.arange(len(made["k"]), device=made["q"].device)[None, :]
    return (place >= made["k_starts"][:, None]) & (place < made["k_ends"][:, None])


def check(made: dict[str, Any], actual: torch.Tensor, is_half: bool = False) -> None:
    expected = fp8_ragged_mqa_logits_trace.reference(**{**made, "output_dtype": torch.float64})
    bound = error_bound(made["q"], made["k"], made["weights"], made["k_scales"], 22)  # halves or floats, on any device
    check_scores(actual, expected, seen_of(made), bound, is_half)
