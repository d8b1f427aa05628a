# SPDX-License-Identifier: Apache-2.0
"""Two-sided exchange of tokens between the ranks of an expert-parallel layer: sender and receiver both know the rows.

:func:`moe_comm` moves rows; what goes where is index arithmetic, in torch on the device of the tensors, and no value is
looked at on the host: calls may be captured in graphs.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..._runtime.errors import ArgumentError
from ...api_logging import flashinfer_api
from ...jit.codegen import module_cache
from ...jit.comm import gen_moe_comm_module as gen_moe_comm_module
from ...trace.templates.comm import moe_comm_trace
from ..memory.waiting import waiting_for

__all__ = [
    "get_comm_alltoall_module",
    "get_moe_commworkspace_size_per_rank",
    "get_moe_prepare_workspace_size_per_rank",
    "moe_comm",
    "moe_comm_prepare_indices",
    "moe_local_gather",
    "moe_prepare",
    "set_moe_max_usable_sm_count",
]

get_moe_comm_module = module_cache(gen_moe_comm_module)


def get_comm_alltoall_module() -> Any:
    """Return the module of the exchange for CUDA."""
    return get_moe_comm_module("cuda")


_MAX_EP = 64
# Layout in include/flashinfer/comm/alltoall/fifo.h; a test compares with moe_comm_workspace_bytes.
_HEAD_BYTES, _SOURCE_BYTES = 1152, 4 * (128 << 10)
_usable_sms = 0  # 0: all


def set_moe_max_usable_sm_count(max_sm_count: int) -> None:
    """Let no exchange of this process take more than ``max_sm_count`` multiprocessors, at least 2."""
    global _usable_sms
    if max_sm_count < 2:
        raise ArgumentError(f"set_moe_max_usable_sm_count: max_sm_count must be at least 2, got {max_sm_count}")
    _usable_sms = max_sm_count


def get_moe_commworkspace_size_per_rank(ep_size: int) -> int:
    """Return the uint64 words of a rank for :func:`moe_comm`; they begin as zeros."""
    if not 1 <= ep_size <= _MAX_EP:
        raise ArgumentError(f"get_moe_commworkspace_size_per_rank: ep_size must be from 1 to {_MAX_EP}, got {ep_size}")
    return (_HEAD_BYTES + ep_size * _SOURCE_BYTES) // 8


def get_moe_prepare_workspace_size_per_rank(ep_size: int) -> int:
    """Return the uint64 words of a rank for :func:`moe_prepare`; they begin as zeros."""
    return get_moe_commworkspace_size_per_rank(ep_size)


@flashinfer_api(trace=moe_comm_trace)
def moe_comm(
    input: torch.Tensor,
    send_rank_cum_sum: torch.Tensor,
    send_indices: torch.Tensor,
    output: torch.Tensor,
    recv_rank_cum_sum: torch.Tensor,
    recv_indices: torch.Tensor,
    all_workspaces: torch.Tensor,
    ep_rank: int,
    ep_size: int,
) -> None:
    """Send rows to the ranks of a group and receive theirs: what rank p sends to this rank arrives in p's order.

    Rows of ``output`` that no index names keep what they have. A rank that sends fewer rows than its peer expects makes
    the peer raise :class:`CommTimeoutError`.

    Parameters
    ----------
    input, output : torch.Tensor
        ``(rows, elements)`` of one dtype, contiguous; rows of a multiple of 16 bytes, at most 128 KiB.
    send_rank_cum_sum, recv_rank_cum_sum : torch.Tensor
        ``(ep_size,)`` int32, inclusive sums of the rows for, and from, each rank.
    send_indices, recv_indices : torch.Tensor
        int32 rows of ``input`` in order of rank, and rows of ``output`` in which they arrive.
    all_workspaces : torch.Tensor
        ``(ep_size, words)`` uint64 that all ranks see, zeros at first: :func:`get_moe_commworkspace_size_per_rank`.
    ep_rank, ep_size : int
        This rank, and the ranks of the group.

    Examples
    --------
    >>> from flashinfer.comm import trtllm_alltoall
    >>> space = torch.zeros(1, trtllm_alltoall.get_moe_commworkspace_size_per_rank(1), dtype=torch.uint64)
    >>> x, out = torch.randn(3, 8), torch.zeros(3, 8)
    >>> count, order = torch.tensor([2], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    >>> trtllm_alltoall.moe_comm(x, count, order, out, count, torch.tensor([0, 1], dtype=torch.int32), space, 0, 1)
    >>> torch.equal(out[:2], x[[2, 0]])
    True
    """
    op = "moe_comm"
    if all_workspaces.dim() != 2 or all_workspaces.shape[0] != ep_size or all_workspaces.dtype != torch.uint64:
        raise ArgumentError(
            f"{op}: all_workspaces must be uint64 of ep_size = {ep_size} rows, got {all_workspaces.dtype} "
            f"{tuple(all_workspaces.shape)}"
        )
    if not 0 <= ep_rank < ep_size:
        raise ArgumentError(f"{op}: ep_rank must be in [0, {ep_size}), got {ep_rank}")
    table = all_workspaces.view(torch.uint8)
    function = get_moe_comm_module(table.device.type).moe_comm
    progress = torch.zeros(2 * ep_size, dtype=torch.int64)

    def call(resume: bool, wait_us: int, max_blocks: int, *more: int) -> int:
        blocks = min(max_blocks, _usable_sms) if _usable_sms else max_blocks
        return function(
            *(input, send_rank_cum_sum, send_indices, output, recv_rank_cum_sum, recv_indices, table, ep_rank),
            *(progress, resume, wait_us, blocks, *more),
        )

    waiting_for(table, ep_rank).run(op, 1, call)


def _packed(chosen: torch.Tensor, size: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inclusive sums of the true elements of each row of ``chosen``, and ``value`` of those, one after the
    other, in a buffer of ``size``; the rest is 0."""
    flat = chosen.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, size)  # what is not chosen goes behind the end
    found = value.new_zeros(size + 1).scatter_(0, place, value.flatten())[:size]
    return chosen.sum(1).cumsum(0).to(torch.int32), found.to(torch.int32)


def _indices(
    ranks: torch.Tensor, global_row: torch.Tensor, ep_rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the indices of an exchange from the ranks ``(ep, max, top_k)`` of all tokens, -1 for none.

    ``global_row`` ``(ep, max)``: number of each token in the gathered table.
    """
    ep_size, most, top_k = ranks.shape
    device = ranks.device
    is_for = (ranks.unsqueeze(-1) == torch.arange(ep_size, device=device)).transpose(2, 3)  # ep, max, target, top_k
    goes = is_for.any(-1)
    own = goes[ep_rank].T  # target, token
    tokens = torch.arange(most, device=device).expand(ep_size, most)
    first = is_for[ep_rank].to(torch.uint8).argmax(-1).T  # the first position of a token that goes to the target
    size = most * max(top_k, ep_size)
    send_sums, send = _packed(own, size, tokens)
    _, backward = _packed(own, size, tokens * top_k + first)
    recv_sums, gather = _packed(goes[:, :, ep_rank], most * ep_size, global_row)
    order = torch.arange(most * ep_size, dtype=torch.int32, device=device)
    return gather, send_sums, send, recv_sums, order, backward


def moe_comm_prepare_indices(
    gathered_target_rank_ids: torch.Tensor,
    real_rank_token_count_cum_sum: Optional[torch.Tensor],
    max_token_count_per_rank: int,
    expert_count: int,
    top_k: int,
    ep_rank: int,
    ep_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what goes where, from the target ranks ``(tokens, top_k)`` int32 of the tokens of all ranks.

    Tokens of a rank are neighbours: ``max_token_count_per_rank`` each, or as many as the inclusive sums
    ``real_rank_token_count_cum_sum`` say. A token goes to a rank once.

    Returns six int32 tensors: rows of the gathered table in order of arrival ``(max * ep,)``; sums ``(ep,)`` and own
    tokens of what is sent; sums and places of what is received; places ``token * top_k + k`` of what comes back, ``k``
    the first position whose target was that rank.
    """
    op = "moe_comm_prepare_indices"
    ids, most = gathered_target_rank_ids, max_token_count_per_rank
    if ids.dim() != 2 or ids.shape[1] != top_k:
        raise ArgumentError(f"{op}: gathered_target_rank_ids must be (tokens, top_k = {top_k}), got {tuple(ids.shape)}")
    if not 0 <= ep_rank < ep_size <= _MAX_EP:
        raise ArgumentError(f"{op}: ep_rank must be in [0, ep_size) and ep_size at most 64, got {ep_rank}, {ep_size}")
    slots = torch.arange(most, device=ids.device).expand(ep_size, most)
    if real_rank_token_count_cum_sum is None:
        if ids.shape[0] != ep_size * most:
            raise ArgumentError(
                f"{op}: gathered_target_rank_ids must have {ep_size * most} rows (ep_size * max_token_count_per_rank) "
                f"without real_rank_token_count_cum_sum, got {ids.shape[0]}"
            )
        begin = torch.arange(ep_size, device=ids.device).unsqueeze(1) * most
        is_real = torch.ones_like(slots, dtype=torch.bool)
    else:
        end = real_rank_token_count_cum_sum.long().unsqueeze(1)
        begin = torch.cat([torch.zeros_like(end[:1]), end[:-1]])
        is_real = slots < end - begin
    row = begin + slots
    ranks = (
        torch.where(is_real.unsqueeze(-1), ids[torch.where(is_real, row, 0)], -1)
        if ids.shape[0]
        else ids.new_full((ep_size, most, top_k), -1)
    )
    return _indices(ranks, row, ep_rank)


def moe_local_gather(
    recv_rank_cum_sum: torch.Tensor,
    local_gather_indices: torch.Tensor,
    gathered_expert_ids: torch.Tensor,
    gathered_scales: Optional[torch.Tensor],
    local_expert_ids: torch.Tensor,
    local_scales: Optional[torch.Tensor],
    max_token_count_per_rank: int,
    expert_count: int,
    top_k: int,
    ep_rank: int,
    ep_size: int,
) -> None:
    """Copy experts and scales of the tokens that this rank receives; other rows get ``expert_count`` and 0."""
    rows = max_token_count_per_rank * ep_size
    if local_expert_ids.shape != (rows, top_k):
        raise ArgumentError(
            f"moe_local_gather: local_expert_ids must be ({rows}, {top_k}) (tokens of all ranks, top_k), got "
            f" {tuple(local_expert_ids.shape)}"
        )
    is_real = (torch.arange(rows, device=recv_rank_cum_sum.device) < recv_rank_cum_sum[-1]).unsqueeze(1)
    place = local_gather_indices.long()
    local_expert_ids.copy_(torch.where(is_real, gathered_expert_ids[place], expert_count))
    if local_scales is not None and gathered_scales is not None:
        local_scales.copy_(torch.where(is_real, gathered_scales[place], 0.0))


def _gather_all(rows: torch.Tensor, workspace: torch.Tensor, ep_rank: int, ep_size: int) -> torch.Tensor:
    """Return the rows of all ranks, ``(ep, *rows.shape)``, over the memory of an exchange; as many on each."""
    count = rows.shape[0]
    own = torch.arange(count, dtype=torch.int32, device=rows.device)
    sums = torch.arange(1, ep_size + 1, dtype=torch.int32, device=rows.device) * count
    order = torch.arange(count * ep_size, dtype=torch.int32, device=rows.device)
    found = rows.new_empty(ep_size * count, rows.shape[1])
    moe_comm(rows, sums, own.repeat(ep_size), found, sums, order, workspace, ep_rank, ep_size)
    return found.view(ep_size, count, rows.shape[1])


def moe_prepare(
    experts_ids: torch.Tensor,
    scales: Optional[torch.Tensor],
    experts_statics: Optional[torch.Tensor],
    workspace: torch.Tensor,
    max_token_count_per_rank: int,
    ep_rank: int,
    ep_size: int,
    expert_count: int,
    slot_count: int,
    top_k: int,
) -> tuple[torch.Tensor, ...]:
    """Exchange the experts of all tokens and return what goes where; every rank calls it, with its own tokens.

    ``experts_ids`` ``(tokens, top_k)`` int32 are numbers of slots, of which each rank has ``slot_count // ep_size``;
    ``scales`` float32 alike, or None; ``experts_statics`` ``(expert_count,)`` int32, or None.

    Returns slots and scales of the tokens that arrive here (``slot_count`` for other ranks' slots, and with scale 0 for
    rows without a token), sums and indices of what is sent, of what is received, places of what comes back, and the
    statistics of all ranks.
    """
    op = "moe_prepare"
    most, tokens = max_token_count_per_rank, experts_ids.shape[0]
    if experts_ids.dim() != 2 or experts_ids.shape[1] != top_k or experts_ids.dtype != torch.int32:
        raise ArgumentError(
            f"{op}: experts_ids must be int32 (tokens, top_k = {top_k}), got {experts_ids.dtype} "
            f"{tuple(experts_ids.shape)}"
        )
    if tokens > most:
        raise ArgumentError(f"{op}: experts_ids must have at most max_token_count_per_rank = {most} rows, got {tokens}")
    if scales is not None and (scales.shape != experts_ids.shape or scales.dtype != torch.float32):
        raise ArgumentError(
            f"{op}: scales must be float32 {tuple(experts_ids.shape)}, got {scales.dtype} {tuple(scales.shape)}"
        )
    if slot_count % ep_size:
        raise ArgumentError(f"{op}: slot_count must be divisible by ep_size = {ep_size}, got {slot_count}")
    if expert_count % 4:
        raise ArgumentError(f"{op}: expert_count must be a multiple of 4, got {expert_count}")
    width = -(-2 * top_k // 4) * 4  # rows of whole 16 bytes
    rows = experts_ids.new_full((most, width), -1)
    rows[:tokens, :top_k] = experts_ids
    rows[:tokens, top_k : 2 * top_k] = 0 if scales is None else scales.view(torch.int32)
    gathered = _gather_all(rows, workspace, ep_rank, ep_size)
    statistics = None
    if experts_statics is not None:
        statistics = _gather_all(experts_statics.view(1, -1), workspace, ep_rank, ep_size).view(ep_size, -1)

    ids, each = gathered[:, :, :top_k], slot_count // ep_size
    is_slot = (ids >= 0) & (ids < slot_count)
    ranks = torch.where(is_slot, ids // each, -1)
    row = torch.arange(ep_size * most, device=ids.device).view(ep_size, most)
    gather, send_sums, send, recv_sums, recv, backward = _indices(ranks, row, ep_rank)
    here = torch.where(is_slot & (ranks == ep_rank), ids, slot_count).reshape(-1, top_k)
    local_ids = here.new_empty(ep_size * most, top_k)
    local_scales = torch.empty(ep_size * most, top_k, dtype=torch.float32, device=ids.device)
    weights = gathered[:, :, top_k : 2 * top_k].contiguous().view(torch.float32).view(-1, top_k)
    moe_local_gather(
        *(recv_sums, gather, here, weights, local_ids, local_scales, most, slot_count, top_k, ep_rank, ep_size)
    )
    found = None if scales is None else local_scales
    return local_ids, found, send_sums, send, recv_sums, recv, backward, statistics  # type: ignore[return-value]
