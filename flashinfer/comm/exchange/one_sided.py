# SPDX-License-Identifier: Apache-2.0
"""Calls of the one-sided exchange of tokens: each token goes to the ranks of its experts, and results come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError
from ...api_logging import flashinfer_api
from ...trace.templates.comm import moe_a2a_combine_trace, moe_a2a_dispatch_trace
from ..memory.waiting import waiting_for
from .table import (
    EPLB_EXPERTS,
    LINEAR,
    MAX_TOKENS,
    OFFSETS,
    PAYLOAD,
    active_ranks_of,
    check_backend,
    get_alltoall_module,
    pad128,
)

__all__ = ["moe_a2a_combine", "moe_a2a_dispatch", "moe_a2a_sanitize_expert_ids"]

_MAX_PAYLOADS = 6


@dataclass(frozen=True)
class _Receive:
    """Receive buffers in the workspace, the widest payload first, so that each is aligned without padding."""

    offsets: torch.Tensor
    views: tuple[torch.Tensor, ...]
    combine_offset: int


def _receive(
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    rows: int,
    ep_rank: int,
    ep_size: int,
    like: Sequence[torch.Tensor],
) -> _Receive:
    """Return where a call receives.

    Results of the experts begin behind the receive buffers of the largest call: a quick rank sends tokens of the next
    call, which may have more rows, while a slow one still reads results of this one.
    """
    first, most = int(metainfo[PAYLOAD]), int(metainfo[MAX_TOKENS])
    sizes = [x.shape[1] * x.element_size() for x in like]
    reserved = waiting_for(workspace, ep_rank).reserve(sum(sizes))
    order = sorted(range(len(like)), key=lambda i: -min(sizes[i] & -sizes[i], 16) if sizes[i] else 0)
    offsets, at = [0] * len(like), first
    for i in order:
        offsets[i] = at
        at += ep_size * rows * sizes[i]
    combine = first + pad128(ep_size * most * reserved)
    if max(combine, at) > workspace.shape[1]:
        raise ArgumentError(
            f"moe_a2a_dispatch: input_payloads must fit in the workspace ({workspace.shape[1]} bytes a rank), got "
            f"{max(combine, at)} bytes for {most} tokens (max_num_tokens)"
        )
    own = workspace[ep_rank]
    views = tuple(
        own[at : at + ep_size * rows * size].view(x.dtype).view(ep_size, rows, x.shape[1])
        for at, size, x in zip(offsets, sizes, like, strict=True)
    )
    return _Receive(torch.tensor(offsets, dtype=torch.int64), views, combine)


def _layout_digest(top_k: int, num_experts: int, payloads: Sequence[torch.Tensor]) -> int:
    """Return 32 bits of what must be equal on all ranks."""
    import zlib

    return zlib.crc32(repr((top_k, num_experts, [(str(x.dtype), x.shape[1]) for x in payloads])).encode())


@flashinfer_api(trace=moe_a2a_dispatch_trace)
def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: Optional[bool] = None,
    eplb_local_stats: Optional[torch.Tensor] = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Optional[torch.Tensor] = None,
    *,
    recv_view_cache: Optional[dict[Any, Any]] = None,
    backend: str = "trtllm",
) -> tuple[list[torch.Tensor], int, Optional[torch.Tensor]]:
    """Store each token into the memory of the ranks of its experts, once per rank, and wait for those of all ranks.

    Ranks without tokens take part. All ranks pass the same numbers and payloads of the same row sizes; those that
    differ raise, on CUDA in the next call.

    Parameters
    ----------
    token_selected_experts : torch.Tensor
        ``(tokens, top_k)`` int32, contiguous; numbers outside of ``[0, num_experts)`` stand for no expert. Experts of a
        rank are neighbours; the first ``num_experts % ep_size`` ranks have one more.
    input_payloads : Sequence[torch.Tensor]
        1 to 6 tensors ``(tokens, elements)``, contiguous, of any type and row size. No call may have more bytes per
        token than the first one of a table (or than a :class:`MoeAlltoAll` was made for).
    workspace, metainfo
        The table ``(ep_size, bytes)`` uint8, and the offsets of :func:`moe_a2a_initialize`.
    runtime_max_tokens_per_rank : int
        Rows per source of the receive buffers; no rank has more tokens.
    ep_rank, ep_size, top_k, num_experts : int
        This rank, and sizes that are equal on all ranks; ``top_k`` at most 22.
    enable_pdl : bool, optional
        Programmatic dependent launch; default: where the GPU has it.
    eplb_local_stats : torch.Tensor, optional
        int32 statistics of experts, gathered from all ranks.
    enable_rank_mask, active_rank_mask
        Ranks that take part (:func:`moe_a2a_active_rank_mask`): others get nothing and are not waited for.
    recv_view_cache : dict, optional
        Keeps the returned views for calls of the same sizes.
    backend : str
        ``"trtllm"``.

    Returns
    -------
    tuple
        Views ``(ep_size, runtime_max_tokens_per_rank, elements)`` of what arrived, by source and in order of token; the
        offset for the results of :func:`moe_a2a_combine`; gathered statistics ``(ep_size, experts)`` or None.

    Examples
    --------
    >>> x, ids = torch.randn(4, 64), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    >>> workspace = torch.zeros(1, 1 << 20, dtype=torch.uint8)
    >>> metainfo = flashinfer.comm.moe_a2a_initialize(workspace, 0, 1, 8)
    >>> (rows,), offset, _ = flashinfer.comm.moe_a2a_dispatch(ids, [x], workspace, metainfo, 8, 0, 1, 2, 2)
    >>> torch.equal(rows[0, :4], x)
    True
    """
    op = "moe_a2a_dispatch"
    check_backend(op, backend)
    active = active_ranks_of(op, enable_rank_mask, active_rank_mask, ep_rank, ep_size)
    if not 1 <= len(input_payloads) <= _MAX_PAYLOADS:
        raise ArgumentError(f"{op}: input_payloads must be 1 to {_MAX_PAYLOADS} tensors, got {len(input_payloads)}")
    if token_selected_experts.dim() != 2 or token_selected_experts.shape[1] != top_k:
        raise ArgumentError(
            f"{op}: token_selected_experts must be (tokens, top_k = {top_k}), got {tuple(token_selected_experts.shape)}"
        )
    if workspace.dim() != 2 or workspace.shape[0] != ep_size:
        raise ArgumentError(f"{op}: workspace must have ep_size = {ep_size} rows, got {tuple(workspace.shape)}")
    if not 0 <= ep_rank < ep_size:
        raise ArgumentError(f"{op}: ep_rank must be in [0, {ep_size}), got {ep_rank}")
    if runtime_max_tokens_per_rank <= 0:
        raise ArgumentError(f"{op}: runtime_max_tokens_per_rank must be positive, got {runtime_max_tokens_per_rank}")
    for i, x in enumerate(input_payloads):
        if x.dim() != 2:
            raise ArgumentError(f"{op}: input_payloads[{i}] must be (tokens, elements), got {tuple(x.shape)}")
    rows, found, cache_key = runtime_max_tokens_per_rank, None, None
    if recv_view_cache is not None:
        if recv_view_cache.get("workspace") is not workspace:
            recv_view_cache.clear()
            recv_view_cache["workspace"] = workspace
        cache_key = (rows, ep_rank, top_k, num_experts, *((x.dtype, x.shape[1]) for x in input_payloads))
        found = recv_view_cache.get(cache_key)
    if found is None:
        receive = _receive(workspace, metainfo, rows, ep_rank, ep_size, input_payloads)
        found = (receive, _layout_digest(top_k, num_experts, input_payloads))
        if recv_view_cache is not None:
            recv_view_cache[cache_key] = found
    receive, digest = found
    given = [*input_payloads, *[None] * (_MAX_PAYLOADS - len(input_payloads))]
    module = get_alltoall_module(workspace.device.type)
    pdl = enable_pdl is not False

    def call(resume: bool, *waits: int) -> int:
        return module.moe_a2a_dispatch(
            *(token_selected_experts, *given, receive.offsets, workspace, metainfo, ep_rank, num_experts, rows),
            *(digest, active, eplb_local_stats, resume, *waits, pdl),
        )

    waiting_for(workspace, ep_rank).run(op, 1, call)
    gathered = None
    if eplb_local_stats is not None:
        begin, experts = int(metainfo[OFFSETS.index("EPLB_GATHERED_STATS")]), int(metainfo[EPLB_EXPERTS])
        own = workspace[ep_rank, begin : begin + 4 * ep_size * experts]
        gathered = own.view(torch.int32).view(ep_size, experts)
    return list(receive.views), receive.combine_offset, gathered


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: Optional[bool] = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Put ``invalid_expert_id`` into the rows of ``(ep_size, rows, top_k)`` int32 ids that no token arrived in."""
    check_backend("moe_a2a_sanitize_expert_ids", backend)
    module = get_alltoall_module(workspace.device.type)
    pdl = enable_pdl is not False
    module.moe_a2a_sanitize_expert_ids(expert_ids, workspace, metainfo, ep_rank, invalid_expert_id, pdl)


@flashinfer_api(trace=moe_a2a_combine_trace)
def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: Optional[torch.dtype] = None,
    output_scales: Optional[torch.Tensor] = None,
    output_scalar_scale: float = 1.0,
    sf_layout: int = LINEAR,
    output: Optional[torch.Tensor] = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: Optional[bool] = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Optional[torch.Tensor] = None,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Add the results of each token over the ranks it went to, in float32, rounded once.

    Parameters
    ----------
    payload : torch.Tensor
        ``(ep_size, runtime_max_tokens_per_rank, hidden)`` float16, bfloat16 or float32, contiguous: the result for each
        row that arrived, zero where this rank has nothing to add.
    local_num_tokens : int
        Tokens that this rank dispatched.
    workspace, metainfo, runtime_max_tokens_per_rank, ep_rank, ep_size, top_k
        As of the dispatch.
    combine_payload_offset : int
        Of the dispatch.
    payload_in_workspace : bool
        ``payload`` is at that offset of this rank's row already, so that nothing is copied.
    output_dtype, output_scales, output_scalar_scale, sf_layout
        Of quantised outputs, which need a Blackwell GPU: must be the defaults, or the dtype of ``payload``.
    output : torch.Tensor, optional
        ``(local_num_tokens, hidden)``, contiguous.
    use_low_precision : bool
        Results travel as float8_e4m3fn; bfloat16 only.
    enable_pdl, enable_rank_mask, active_rank_mask, backend
        As of the dispatch.

    Returns
    -------
    torch.Tensor
        ``(local_num_tokens, hidden)``.

    Examples
    --------
    >>> x, ids = torch.randn(4, 64), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    >>> workspace = torch.zeros(1, 1 << 20, dtype=torch.uint8)
    >>> metainfo = flashinfer.comm.moe_a2a_initialize(workspace, 0, 1, 8)
    >>> (rows,), offset, _ = flashinfer.comm.moe_a2a_dispatch(ids, [x], workspace, metainfo, 8, 0, 1, 2, 2)
    >>> torch.equal(flashinfer.comm.moe_a2a_combine(rows, 4, workspace, metainfo, 8, 0, 1, 2, offset), x)
    True
    """
    op = "moe_a2a_combine"
    check_backend(op, backend)
    active = active_ranks_of(op, enable_rank_mask, active_rank_mask, ep_rank, ep_size)
    if output is not None:
        if not output.is_contiguous():
            raise ArgumentError(f"{op}: output must be contiguous, got strides {output.stride()}")
        on_cpu = payload.device.type == "cpu" and workspace.dim() == 2 and workspace.shape[0] == ep_size
        if not output.is_cuda and not on_cpu:
            raise ArgumentError(f"{op}: output must be a CUDA tensor, got one on {output.device}")
    if (output_dtype is not None and output_dtype != payload.dtype) or output_scales is not None:
        raise ArgumentError(
            f"{op}: output_dtype must be that of payload ({payload.dtype}) without output_scales, because quantised "
            f"outputs need compute capability 10.0 (SM100), got {output_dtype}"
        )
    if payload.dim() != 3 or payload.shape[1] != runtime_max_tokens_per_rank:
        raise ArgumentError(
            f"{op}: payload must be (ep_size, runtime_max_tokens_per_rank, hidden) = ({ep_size}, "
            f"{runtime_max_tokens_per_rank}, hidden), got {tuple(payload.shape)}"
        )
    if output is None:
        output = payload.new_empty(local_num_tokens, payload.shape[2])
    elif output.shape != (local_num_tokens, payload.shape[2]):
        raise ArgumentError(
            f"{op}: output must be ({local_num_tokens}, {payload.shape[2]}) (local_num_tokens, hidden), got "
            f"{tuple(output.shape)}"
        )
    module, pdl = get_alltoall_module(workspace.device.type), enable_pdl is not False

    def call(resume: bool, *waits: int) -> int:
        return module.moe_a2a_combine(
            *(payload, output, workspace, metainfo, ep_rank, top_k, combine_payload_offset, payload_in_workspace),
            *(use_low_precision, active, resume, *waits, pdl),
        )

    waiting_for(workspace, ep_rank).run(op, 2, call)
    return output
