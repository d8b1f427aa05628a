# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.fused_moe.moe_permute`` and ``moe_unpermute``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..notation import template_of_text
from .shared import normal, randint, seeded

__all__ = ["moe_permute_trace", "moe_unpermute_trace"]


def _moe_permute_reference(
    input: torch.Tensor,
    permuted_output: torch.Tensor,
    permuted_idx_to_expanded_idx: torch.Tensor,
    max_num_permuted_tokens: int,
    top_k: int,
    **_: Any,
) -> torch.Tensor:
    """Rows without a pair keep what the output had."""
    pairs = permuted_idx_to_expanded_idx[:max_num_permuted_tokens]
    rows = (pairs >= 0).nonzero().flatten()
    out = permuted_output.clone()
    out[rows] = input[pairs[rows].long() // top_k]
    return out


def _moe_unpermute_reference(
    permuted_input: torch.Tensor,
    output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    topk_scales: Optional[torch.Tensor],
    input_is_expanded: bool = False,
    **_: Any,
) -> torch.Tensor:
    index = expanded_idx_to_permuted_idx.view(output.shape[0], -1).long()
    if input_is_expanded:
        index = torch.where(index < 0, index, torch.arange(index.numel(), device=index.device).view(index.shape))
    rows = permuted_input.float()[index.clamp(min=0)].masked_fill((index < 0).unsqueeze(2), 0.0)
    if topk_scales is not None:
        rows = rows * topk_scales.unsqueeze(2)
    return rows.sum(dim=1).to(output.dtype)


def _moe_permute_init(
    *,
    num_tokens: int,
    hidden_size: int = 256,
    top_k: int = 4,
    num_rows: int = 0,
    num_indices: int = 0,
    num_tiles: int = 0,
    one: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    rows = num_tokens * top_k
    return {
        "input": normal(g, num_tokens, hidden_size),
        "permuted_output": torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device=device),
        "tile_idx_to_mn_limit": None,
        "permuted_idx_to_expanded_idx": torch.randperm(rows, generator=g, device=device).int(),
        "num_non_exiting_tiles": None,
        "max_num_permuted_tokens": rows,
        "top_k": top_k,
        "tile_size": 1,
    }


def _moe_unpermute_init(
    *, num_tokens: int, hidden_size: int = 256, top_k: int = 4, num_rows: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "permuted_input": normal(g, num_tokens * top_k, hidden_size),
        "output": torch.zeros(num_tokens, hidden_size, dtype=torch.bfloat16, device=device),
        "expanded_idx_to_permuted_idx": randint(g, num_tokens * top_k, num_tokens, top_k, low=-1),
        "topk_scales": normal(g, num_tokens, top_k, dtype=torch.float32),
        "num_tokens": num_tokens,
        "top_k": top_k,
    }


_NOTES = {
    "permuted_idx_to_expanded_idx": "token * top_k + slot of a row; negative: no pair",
    "expanded_idx_to_permuted_idx": "row of (token, slot); negative: skipped",
    "tile_idx_to_mn_limit": "not read",
    "num_non_exiting_tiles": "not read",
    "tile_size": "not read",
}

moe_permute_trace = template_of_text(
    "moe_permute_h{hidden_size}",
    "moe_permute",
    var="num_tokens num_rows num_indices num_tiles one",
    inputs="input[num_tokens, hidden_size]; permuted_output[num_rows, hidden_size]; tile_idx_to_mn_limit[num_tiles]?;"
    "permuted_idx_to_expanded_idx[num_indices]; num_non_exiting_tiles[one]?; max_num_permuted_tokens:int32;"
    "top_k:int32; tile_size:int32",
    outputs="permuted[num_rows, hidden_size]<-permuted_output",
    notes=_NOTES,
    reference=_moe_permute_reference,
    init=_moe_permute_init,
    description="Copy the row of each token to the rows of its experts.",
)

moe_unpermute_trace = template_of_text(
    "moe_unpermute_h{hidden_size}_k{top_k}",
    "moe_unpermute",
    var="num_tokens num_rows",
    inputs="permuted_input[num_rows, hidden_size]; output[num_tokens, hidden_size];"
    "expanded_idx_to_permuted_idx[num_tokens, top_k]; topk_scales[num_tokens, top_k]:float32?",
    outputs="sum[num_tokens, hidden_size]<-output",
    notes=_NOTES,
    reference=_moe_unpermute_reference,
    init=_moe_unpermute_init,
    description="Add up the rows of each token, weighted, in the order of slots.",
)
