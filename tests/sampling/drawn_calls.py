# SPDX-License-Identifier: Apache-2.0
"""Calls of sampling for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..guard_pages import Draw
from ..traced_calls import traced

_ROWS = {"batch_size": (0, 1, 5), "vocab_size": (1, 7, 100, 2051)}


def _rows(draw: Draw, made: dict[str, Any]) -> dict[str, Any]:
    """Draw from some rows, with seeds of any kind."""
    rows = next(x for x in made.values() if isinstance(x, torch.Tensor) and x.ndim == 2).shape[0]
    found: dict[str, Any] = {}
    if draw.chance(0.5) and rows:
        found["indices"] = torch.randint(0, rows, (draw.size(1, 3, 8),)).int()
    count = found["indices"].shape[0] if "indices" in found else rows
    if draw.chance(0.3):
        found |= {"seed": torch.arange(count), "offset": torch.arange(count)}
    return found


_DRAWN: dict[str, Any] = {"more": _rows, "any_number": ("seed", "offset", "top_k")}

CALLS = {
    "sampling_from_logits": traced(flashinfer.sampling.sampling_from_logits, **_DRAWN, **_ROWS),
    "sampling_from_probs": traced(flashinfer.sampling.sampling_from_probs, **_DRAWN, **_ROWS),
    "top_p_sampling_from_probs": traced(flashinfer.sampling.top_p_sampling_from_probs, **_DRAWN, **_ROWS),
    "top_k_sampling_from_probs": traced(flashinfer.sampling.top_k_sampling_from_probs, **_DRAWN, **_ROWS),
    "min_p_sampling_from_probs": traced(flashinfer.sampling.min_p_sampling_from_probs, **_DRAWN, **_ROWS),
    "top_k_top_p_sampling_from_logits": traced(flashinfer.sampling.top_k_top_p_sampling_from_logits, **_DRAWN, **_ROWS),
    "top_k_top_p_sampling_from_probs": traced(flashinfer.sampling.top_k_top_p_sampling_from_probs, **_DRAWN, **_ROWS),
    "softmax": traced(flashinfer.sampling.softmax, **_ROWS),
    "top_p_renorm_probs": traced(flashinfer.sampling.top_p_renorm_probs, **_ROWS),
    "top_k_renorm_probs": traced(flashinfer.sampling.top_k_renorm_probs, any_number=("top_k",), **_ROWS),
    "top_k_mask_logits": traced(flashinfer.sampling.top_k_mask_logits, any_number=("top_k",), **_ROWS),
    "chain_speculative_sampling": traced(
        flashinfer.sampling.chain_speculative_sampling,
        any_number=("draft_token_ids",),
        num_speculative=(0, 1, 3),
        **_ROWS,
    ),
}
