# SPDX-License-Identifier: Apache-2.0
"""Rows to sample from, and the sampling functions by name."""

from __future__ import annotations

from typing import Any, Callable

import torch

import flashinfer
from flashinfer.trace.templates import sampling as templates

INF = float("inf")


def probs(rows: int, vocab: int, device: str, spread: float = 3.0) -> torch.Tensor:
    return torch.softmax(spread * torch.randn(rows, vocab, device=device), dim=-1)


# Name -> further arguments, such that each filter both keeps and drops columns.
DRAWS: dict[str, list[dict[str, Any]]] = {
    "sampling_from_probs": [{}],
    "sampling_from_logits": [{}],
    "top_p_sampling_from_probs": [{"top_p": 0.05}, {"top_p": 0.5}, {"top_p": 0.97}],
    "top_k_sampling_from_probs": [{"top_k": 1}, {"top_k": 10}, {"top_k": 3000}],
    "min_p_sampling_from_probs": [{"min_p": 0.05}, {"min_p": 0.9}],
    "top_k_top_p_sampling_from_probs": [
        {"top_k": k, "top_p": 0.6, "filter_apply_order": order}
        for k in (10, 3000)
        for order in ("top_k_first", "joint")
    ],
    "top_k_top_p_sampling_from_logits": [
        {"top_k": k, "top_p": 0.6, "filter_apply_order": order}
        for k in (10, 3000)
        for order in ("top_k_first", "joint")
    ],
}
CASES = [(name, arguments) for name, several in DRAWS.items() for arguments in several]


def takes_logits(name: str) -> bool:
    return name.endswith("_logits")


def rows_for(name: str, rows: int, vocab: int, device: str, spread: float = 3.0) -> torch.Tensor:
    x = probs(rows, vocab, device, spread)
    return x.log() if takes_logits(name) else x


def function(name: str) -> Callable[..., Any]:
    return getattr(flashinfer.sampling, name)


def reference(name: str) -> Callable[..., Any]:
    return function(name)._trace_template.reference


def kept(name: str, x: torch.Tensor, **parameters: Any) -> torch.Tensor:
    """Return the distribution that a function draws from, computed by sorting in float64."""
    order = parameters.get("filter_apply_order", "top_k_first")
    p = templates.probabilities(x) if takes_logits(name) else x.double()
    if "min_p" in parameters:
        p = torch.where(p >= parameters["min_p"] * p.amax(dim=-1, keepdim=True), p, 0)
    by_count = templates.keep_top_k(p, parameters.get("top_k", p.shape[-1]))
    whole = templates.normalised(by_count) if order == "top_k_first" else p
    by_mass = templates.keep_top_p(whole, parameters.get("top_p", 1.0))
    return templates.normalised(torch.where((by_count > 0) & (by_mass > 0), p, 0))
