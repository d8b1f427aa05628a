# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts for tests: weights, tables of their addresses, and pairs of tokens and experts."""

from __future__ import annotations

import torch

from flashinfer.fused_moe import fill_w_ptr

LORAS, EXPERTS, TOKENS = 3, 5, 7


def bank(rows: int, columns: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(LORAS, EXPERTS, rows, columns, device=device) / columns**0.5).to(dtype)


def table(device: str, *banks: torch.Tensor) -> tuple[torch.Tensor, int]:
    w_ptr = torch.zeros(len(banks), EXPERTS, dtype=torch.int64, device=device)
    strides = {fill_w_ptr(w_ptr, bank, EXPERTS, i) for i, bank in enumerate(banks)}
    return w_ptr, strides.pop()


def pairs_of(device: str, count: int = 18) -> dict[str, torch.Tensor]:
    """Pairs in any order: one token has none, one no adapter; one expert and one token are out of range."""
    tokens = torch.randint(0, TOKENS - 1, (count,), device=device)
    experts = torch.randint(0, EXPERTS, (count,), device=device)
    loras = torch.randint(0, LORAS, (TOKENS,), device=device)
    tokens[3], experts[5], loras[2], tokens[0] = TOKENS + 9, -1, -1, 2
    return {"sorted_token_ids": tokens, "expert_ids": experts, "lora_indices": loras}
