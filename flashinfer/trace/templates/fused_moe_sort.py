# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.fused_moe.moe_sort``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..notation import template_of_text
from .shared import randint, seeded

__all__ = ["moe_sort_trace"]


def _moe_sort_reference(
    token_selected_experts: torch.Tensor,
    num_experts: int,
    local_expert_offset: int = 0,
    num_local_experts: Optional[int] = None,
    tile_tokens_dim: int = 128,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Rows are listed expert by expert; each expert begins with a new tile."""
    ids, tile = token_selected_experts.flatten().tolist(), tile_tokens_dim
    local = num_experts if num_local_experts is None else num_local_experts
    if len(ids) <= local:
        max_tiles = len(ids)
    else:
        max_tiles = (len(ids) + (tile - 1) * local) // tile
    row_of_pair, pair_of_row = [-1] * len(ids), [-1] * (max_tiles * tile)
    experts: list[int] = []
    limits: list[int] = []
    for expert in range(local):
        pairs = [pair for pair, chosen in enumerate(ids) if chosen == local_expert_offset + expert]
        begin = len(experts) * tile
        for row, pair in enumerate(pairs, begin):
            row_of_pair[pair], pair_of_row[row] = row, pair
        for row in range(begin, begin + len(pairs), tile):
            experts.append(expert)
            limits.append(min(row + tile, begin + len(pairs)))
    tiles = len(experts)
    unused = [-1] * (max_tiles - tiles)
    results = (experts + unused, limits + unused, row_of_pair, pair_of_row, [tiles * tile], [tiles])
    made = [torch.tensor(x, dtype=torch.int32, device=token_selected_experts.device) for x in results]
    made[2] = made[2].view(token_selected_experts.shape)
    return tuple(made)


def _moe_sort_init(
    *,
    num_tokens: int,
    top_k: int = 4,
    num_experts: int = 16,
    max_num_tiles: int = 0,
    max_num_permuted_tokens: int = 0,
    one: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    ids = randint(seeded(seed, device), num_experts, num_tokens, top_k)
    return {"token_selected_experts": ids, "token_final_scales": None, "num_experts": num_experts, "top_k": top_k}


moe_sort_trace = template_of_text(
    "moe_sort_e{num_experts}_k{top_k}",
    "moe_sort",
    var="num_tokens max_num_tiles max_num_permuted_tokens one",
    inputs="token_selected_experts[num_tokens, top_k]; token_final_scales[num_tokens, top_k]?; num_experts:int32;"
    "local_expert_offset:int32?; num_local_experts:int32?; tile_tokens_dim:int32?",
    outputs="tile_idx_to_expert_idx[max_num_tiles]:int32; tile_idx_to_mn_limit[max_num_tiles]:int32;"
    "expanded_idx_to_permuted_idx[num_tokens, top_k]:int32;"
    "permuted_idx_to_expanded_idx[max_num_permuted_tokens]:int32;"
    "total_num_padded_tokens[one]:int32; num_non_exiting_tiles[one]:int32",
    notes={
        "token_selected_experts": "experts of all ranks; others are skipped",
        "token_final_scales": "weights, which are not read",
        "local_expert_offset": "first expert of this rank",
        "tile_tokens_dim": "rows of a tile",
    },
    reference=_moe_sort_reference,
    init=_moe_sort_init,
    description="Order (token, slot) pairs by expert, each expert from the begin of a tile on.",
)
