# SPDX-License-Identifier: Apache-2.0
"""Order of the rows of a mixture-of-experts layer: (token, slot) pairs by expert, in tiles of one expert each."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.fused_moe.routing import get_moe_sort_module
from ..trace.templates.fused_moe_sort import moe_sort_trace

__all__ = ["get_max_num_permuted_tokens", "get_max_num_tiles", "moe_sort"]

_native_sort = NativeFunction(get_moe_sort_module, "moe_sort")
_native_workspace_ints = NativeFunction(get_moe_sort_module, "moe_sort_workspace_ints")


def get_max_num_tiles(num_tokens: int, top_k: int, num_local_experts: int, tile_size: int) -> int:
    """Return the largest number of tiles that :func:`moe_sort` may need."""
    if tile_size < 1:
        raise ArgumentError(f"get_max_num_tiles: tile_size must be at least 1, got {tile_size}")
    pairs = num_tokens * top_k
    if pairs <= num_local_experts:
        return pairs
    return (pairs + (tile_size - 1) * num_local_experts) // tile_size


def get_max_num_permuted_tokens(num_tokens: int, top_k: int, num_local_experts: int, tile_size: int) -> int:
    """Return the largest number of rows that :func:`moe_sort` may need, those that fill up tiles included."""
    return get_max_num_tiles(num_tokens, top_k, num_local_experts, tile_size) * tile_size


_RESULTS = (
    "tile_idx_to_expert_idx",
    "tile_idx_to_mn_limit",
    "expanded_idx_to_permuted_idx",
    "permuted_idx_to_expanded_idx",
    "total_num_padded_tokens",
    "num_non_exiting_tiles",
)


@register_custom_op("flashinfer::moe_sort", mutates_args=_RESULTS)
@called("moe_sort")
def _moe_sort(
    tile_idx_to_expert_idx: torch.Tensor,
    tile_idx_to_mn_limit: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    permuted_idx_to_expanded_idx: torch.Tensor,
    total_num_padded_tokens: torch.Tensor,
    num_non_exiting_tiles: torch.Tensor,
    token_selected_experts: torch.Tensor,
    first_expert: int,
    num_experts: int,
    tile: int,
    enable_pdl: bool,
) -> None:
    ids = token_selected_experts
    ints = _native_workspace_ints[ids.is_cuda](ids.numel(), num_experts)
    scratch = new_empty(ids, torch.int32, num_experts + 1 + ints)
    _native_sort[ids.is_cuda](
        scratch[: num_experts + 1],
        expanded_idx_to_permuted_idx,
        permuted_idx_to_expanded_idx,
        None,
        tile_idx_to_expert_idx,
        None,
        tile_idx_to_mn_limit,
        num_non_exiting_tiles,
        total_num_padded_tokens,
        scratch[num_experts + 1 :],
        ids,
        first_expert,
        num_experts,
        tile,
        tile,
        enable_pdl,
    )


@flashinfer_api(trace=moe_sort_trace)
def moe_sort(
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    num_experts: int,
    top_k: int,
    local_expert_offset: int = 0,
    num_local_experts: Optional[int] = None,
    tile_tokens_dim: int = 128,
    enable_pdl: bool = False,
    out_tile_idx_to_expert_idx: Optional[torch.Tensor] = None,
    out_tile_idx_to_mn_limit: Optional[torch.Tensor] = None,
    out_expanded_idx_to_permuted_idx: Optional[torch.Tensor] = None,
    out_permuted_idx_to_expanded_idx: Optional[torch.Tensor] = None,
    out_total_num_padded_tokens: Optional[torch.Tensor] = None,
    out_num_non_exiting_tiles: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Order (token, slot) pairs by expert. Rows of an expert keep the order of tokens and begin with a new tile.

    Parameters
    ----------
    token_selected_experts : torch.Tensor
        ``(num_tokens, top_k)`` int32, contiguous: experts of all ranks by their number. Other numbers are skipped.
    token_final_scales : Optional[torch.Tensor]
        Weights of the experts. Not read: the order does not depend on them.
    num_experts : int
        Experts of all ranks.
    top_k : int
        Slots of a token.
    local_expert_offset : int
        First expert of this rank.
    num_local_experts : Optional[int]
        Experts of this rank, all if None; at most 1024.
    tile_tokens_dim : int
        Rows of a tile.
    enable_pdl : bool
        Whether the kernel may start before the kernel before it has ended.
    out_tile_idx_to_expert_idx, out_tile_idx_to_mn_limit : Optional[torch.Tensor]
        Buffers for the tables of tiles, int32 and contiguous; the end of a longer one is not written.
    out_expanded_idx_to_permuted_idx, out_permuted_idx_to_expanded_idx : Optional[torch.Tensor]
        Buffers for the order of rows, likewise.
    out_total_num_padded_tokens, out_num_non_exiting_tiles : Optional[torch.Tensor]
        Buffers for the two numbers.

    Returns
    -------
    tuple
        Six int32 tensors:

        - ``tile_idx_to_expert_idx``: ``(max_num_tiles,)``, the expert of a tile, counted from ``local_expert_offset``;
          -1 behind the last tile;
        - ``tile_idx_to_mn_limit``: ``(max_num_tiles,)``, the end of the rows of a tile that have a pair;
        - ``expanded_idx_to_permuted_idx``: ``(num_tokens, top_k)``, the row of a pair, -1 for experts of other ranks;
        - ``permuted_idx_to_expanded_idx``: ``(max_num_permuted_tokens,)``, the pair ``token * top_k + slot`` of a row,
          -1 for rows without one;
        - ``total_num_padded_tokens``: ``(1,)``, rows of all tiles;
        - ``num_non_exiting_tiles``: ``(1,)``, tiles in use.

    Examples
    --------
    >>> ids = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    >>> flashinfer.fused_moe.moe_sort(ids, None, num_experts=4, top_k=2, tile_tokens_dim=4)[2]
    tensor([[4, 0],
            [5, 8]], dtype=torch.int32)
    """
    ids, local = token_selected_experts, num_experts if num_local_experts is None else num_local_experts
    if ids.dim() != 2 or ids.shape[1] != top_k:
        raise ArgumentError(
            f"moe_sort: token_selected_experts must be (num_tokens, top_k = {top_k}), got {tuple(ids.shape)}"
        )
    if not 0 <= local_expert_offset <= num_experts - local or local < 1 or tile_tokens_dim < 1:
        raise ArgumentError(
            f"moe_sort: local_expert_offset, num_local_experts and tile_tokens_dim must name at least one of "
            f"num_experts = {num_experts} experts and one row, got {local_expert_offset}, {local} and {tile_tokens_dim}"
        )
    max_tiles = get_max_num_tiles(ids.shape[0], top_k, local, tile_tokens_dim)
    sizes = ((max_tiles,), (max_tiles,), (ids.shape[0], top_k), (max_tiles * tile_tokens_dim,), (1,), (1,))
    given = (
        out_tile_idx_to_expert_idx,
        out_tile_idx_to_mn_limit,
        out_expanded_idx_to_permuted_idx,
        out_permuted_idx_to_expanded_idx,
        out_total_num_padded_tokens,
        out_num_non_exiting_tiles,
    )
    experts, limits, rows, pairs, num_rows, num_tiles = (
        new_empty(ids, torch.int32, *size) if out is None else out for size, out in zip(sizes, given, strict=True)
    )
    pdl = use_pdl(ids, enable_pdl)
    _moe_sort(experts, limits, rows, pairs, num_rows, num_tiles, ids, local_expert_offset, local, tile_tokens_dim, pdl)
    return experts, limits, rows, pairs, num_rows, num_tiles
