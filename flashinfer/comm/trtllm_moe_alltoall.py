# SPDX-License-Identifier: Apache-2.0
"""One-sided exchange of tokens between the ranks of an expert-parallel layer: each token goes to the ranks of its
experts, and their results come back and are added.

The functions work on a table ``(ranks, bytes)`` that every rank sees (:class:`~.mnnvl.MnnvlMemory`, or one tensor of a
process whose ranks are streams); :class:`MoeAlltoAll` owns one.
"""

from __future__ import annotations

import os
import socket
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.comm import gen_alltoall_module as gen_alltoall_module
from ..trace.templates.comm import moe_a2a_combine_trace, moe_a2a_dispatch_trace
from .mapping import Mapping
from .mnnvl import MnnvlConfig, MnnvlMemory
from .waiting import waiting_for

__all__ = [
    "MoeAlltoAll",
    "get_moe_alltoall_module",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_metainfo_index_pairs",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]

_get_alltoall_module = module_cache(gen_alltoall_module)

#: Names of the entries of ``metainfo``, the order of ``Meta`` in include/flashinfer/comm/alltoall/params.h.
_OFFSETS = (
    *("FLAG_VAL", "LOCAL_TOKEN_COUNTER", "SEND_COUNTERS", "RECV_COUNTERS", "DISPATCH_COMPLETION_FLAGS"),
    *("COMBINE_COMPLETION_FLAGS", "TOPK_TARGET_RANKS", "TOPK_SEND_INDICES", "EPLB_GATHERED_STATS", "PAYLOAD_DATA"),
)
_PAYLOAD, _MAX_TOKENS, _EPLB_EXPERTS, _ENTRIES = 9, 11, 12, 13
_MAX_PAYLOADS = 6
_LINEAR = 2  # SfLayout.layout_linear


class _AlltoallModule:
    """The loaded module, with the names that published programs read from it."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def moe_a2a_get_aux_data_size(self, ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int = 0) -> int:
        """Return the bytes of a rank in front of the payloads."""
        return self._loaded.moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts)

    def moe_a2a_get_metainfo_index_pairs(self) -> tuple[list[str], list[int]]:
        return moe_a2a_get_metainfo_index_pairs()


def get_moe_alltoall_module(device: str = "") -> Any:
    """Return the module of a kind of device; default: that of this machine's GPU, or the CPU where there is none."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _AlltoallModule(_get_alltoall_module(kind))


def moe_a2a_get_metainfo_index_pairs() -> tuple[list[str], list[int]]:
    """Return names of entries of ``metainfo`` and their indices."""
    return [f"MOE_A2A_{name}_OFFSET_INDEX" for name in _OFFSETS], list(range(len(_OFFSETS)))


def _check_backend(op: str, backend: str) -> None:
    if backend == "cake":
        raise ArgumentError(f"{op}: backend='cake' requires compute capability 10.0 or 10.3 (Blackwell), got 'cake'")
    if backend != "trtllm":
        raise ArgumentError(f"{op}: Unknown MoE all-to-all backend: backend must be 'trtllm', got {backend!r}")


def _pad128(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Return the bytes that one rank needs for exchanges of up to ``max_num_tokens`` tokens per rank.

    Examples
    --------
    >>> size = flashinfer.comm.moe_a2a_get_workspace_size_per_rank(8, 128, 7168 + 64, 2 * 7168)
    """
    op = "moe_a2a_get_workspace_size_per_rank"
    _check_backend(op, backend)
    if not 1 <= ep_size <= 64:
        raise ArgumentError(f"{op}: ep_size must be from 1 to 64, got {ep_size}")
    aux = get_moe_alltoall_module().moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts)
    rows = ep_size * max_num_tokens
    return aux + _pad128(rows * total_dispatch_payload_size_per_token) + _pad128(rows * combine_payload_size_per_token)


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Zero the row of this rank and return the offsets into any row, on the CPU. The ranks meet before the first call.

    Examples
    --------
    >>> workspace = torch.zeros(1, 1 << 20, dtype=torch.uint8)
    >>> metainfo = flashinfer.comm.moe_a2a_initialize(workspace, 0, 1, 8)
    """
    op = "moe_a2a_initialize"
    _check_backend(op, backend)
    if workspace.dim() != 2 or workspace.dtype != torch.uint8 or workspace.shape[0] != ep_size:
        raise ArgumentError(
            f"{op}: workspace must be uint8 of ep_size = {ep_size} rows, got {workspace.dtype} {tuple(workspace.shape)}"
        )
    if not 0 <= ep_rank < ep_size <= 64:
        raise ArgumentError(f"{op}: ep_rank must be in [0, ep_size) and ep_size at most 64, got {ep_rank}, {ep_size}")
    metainfo = torch.empty(_ENTRIES, dtype=torch.int64)
    module = get_moe_alltoall_module(workspace.device.type)
    module.moe_a2a_offsets(metainfo, ep_size, max_num_tokens, eplb_stats_num_experts)
    if int(metainfo[_PAYLOAD]) > workspace.shape[1]:
        raise ArgumentError(
            f"{op}: workspace must have at least {int(metainfo[_PAYLOAD])} bytes a rank for {max_num_tokens} tokens "
            f"(max_num_tokens), got {workspace.shape[1]}"
        )
    workspace[ep_rank].zero_()
    if workspace.is_cuda:
        torch.cuda.synchronize(workspace.device)
    waiting_for(workspace, ep_rank, is_new=True)
    return metainfo


def moe_a2a_active_rank_mask(active_ranks: Iterable[int], ep_size: int) -> torch.Tensor:
    """Return the ranks that take part as the bits of one uint64 on the CPU.

    Examples
    --------
    >>> flashinfer.comm.moe_a2a_active_rank_mask([0, 2], 4).item()
    5
    """
    mask = 0
    for rank in active_ranks:
        if not 0 <= rank < ep_size:
            raise ArgumentError(f"moe_a2a_active_rank_mask: active_ranks must be in [0, {ep_size}), got {rank}")
        mask |= 1 << rank
    return torch.tensor([mask - (1 << 64) if mask >> 63 else mask], dtype=torch.int64).view(torch.uint64)


def _active(op: str, enable: bool, mask: Optional[torch.Tensor], ep_rank: int, ep_size: int) -> int:
    """Return the bits of the ranks that take part, as a signed number."""
    if mask is not None and not enable:
        raise ArgumentError(f"{op}: active_rank_mask must be None without enable_rank_mask, got a mask")
    if mask is None:
        if enable:
            raise ArgumentError(f"{op}: active_rank_mask must be given with enable_rank_mask, got None")
        return -1
    bits = int(mask.view(torch.int64).item())
    if not bits >> ep_rank & 1:
        raise ArgumentError(f"{op}: active_rank_mask must have this rank ({ep_rank}), got {bits:#x}")
    return bits


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
    first, most = int(metainfo[_PAYLOAD]), int(metainfo[_MAX_TOKENS])
    sizes = [x.shape[1] * x.element_size() for x in like]
    reserved = waiting_for(workspace, ep_rank).reserve(sum(sizes))
    order = sorted(range(len(like)), key=lambda i: -min(sizes[i] & -sizes[i], 16) if sizes[i] else 0)
    offsets, at = [0] * len(like), first
    for i in order:
        offsets[i] = at
        at += ep_size * rows * sizes[i]
    combine = first + _pad128(ep_size * most * reserved)
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
    _check_backend(op, backend)
    active = _active(op, enable_rank_mask, active_rank_mask, ep_rank, ep_size)
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
    module = _get_alltoall_module(workspace.device.type)
    pdl = enable_pdl is not False

    def call(resume: bool, *waits: int) -> int:
        return module.moe_a2a_dispatch(
            *(token_selected_experts, *given, receive.offsets, workspace, metainfo, ep_rank, num_experts, rows),
            *(digest, active, eplb_local_stats, resume, *waits, pdl),
        )

    waiting_for(workspace, ep_rank).run(op, 1, call)
    gathered = None
    if eplb_local_stats is not None:
        begin, experts = int(metainfo[_OFFSETS.index("EPLB_GATHERED_STATS")]), int(metainfo[_EPLB_EXPERTS])
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
    _check_backend("moe_a2a_sanitize_expert_ids", backend)
    module = _get_alltoall_module(workspace.device.type)
    pdl = enable_pdl is not False
    module.moe_a2a_sanitize_expert_ids(expert_ids, workspace, metainfo, ep_rank, invalid_expert_id, pdl)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor,
    leading_shape: Sequence[int],
    slice_start: int,
    slice_end: int,
    dtype: torch.dtype,
    *,
    backend: str = "trtllm",
) -> torch.Tensor:
    """Return bytes ``[slice_start, slice_end)`` of a row of the table as ``(*leading_shape, elements)``."""
    _check_backend("moe_a2a_wrap_payload_tensor_in_workspace", backend)
    row = workspace if workspace.dim() == 1 else workspace[0]
    return row[slice_start:slice_end].view(dtype).view(*leading_shape, -1)


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
    sf_layout: int = _LINEAR,
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
    _check_backend(op, backend)
    active = _active(op, enable_rank_mask, active_rank_mask, ep_rank, ep_size)
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
    module, pdl = _get_alltoall_module(workspace.device.type), enable_pdl is not False

    def call(resume: bool, *waits: int) -> int:
        return module.moe_a2a_combine(
            *(payload, output, workspace, metainfo, ep_rank, top_k, combine_payload_offset, payload_in_workspace),
            *(use_low_precision, active, resume, *waits, pdl),
        )

    waiting_for(workspace, ep_rank).run(op, 2, call)
    return output


@dataclass
class _Shared:
    """A table and its offsets, shared by objects of one key."""

    memory: MnnvlMemory
    workspace: torch.Tensor
    metainfo: torch.Tensor
    views: dict[Any, Any] = field(default_factory=dict)


_WORKSPACE_CACHE: weakref.WeakValueDictionary[Any, _Shared] = weakref.WeakValueDictionary()


class MoeAlltoAll:
    """One-sided exchange of tokens with a table of its own; calls alternate between ``dispatch`` and ``combine``.

    Objects of equal sizes share one table and must not run at once. Every rank of the group makes the object.

    Parameters
    ----------
    mapping : Mapping
        ``moe_ep_rank`` and ``moe_ep_size`` are the ranks.
    max_num_tokens, top_k, num_experts : int
        Most tokens of a rank, experts of a token, experts of the layer.
    workspace_size_per_rank : int, optional
        Bytes of a rank; default: of :meth:`get_moe_workspace_size_per_rank` with ``hidden_size``.
    hidden_size : int, optional
        Width of tokens in bfloat16.
    mnnvl_config : MnnvlConfig, optional
        Has the communication backend.
    eplb_stats_num_experts : int
        Experts of the statistics that a dispatch may gather.
    enable_rank_mask : bool
        Calls name the ranks that take part.
    device
        Default: the current CUDA device, or the CPU where there is none.
    dispatch_bytes_per_token : int, optional
        Most bytes of a token's payloads; default: what the first dispatch has.
    """

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: Optional[int] = None,
        hidden_size: Optional[int] = None,
        mnnvl_config: Optional[MnnvlConfig] = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
        device: Union[str, torch.device, None] = None,
        dispatch_bytes_per_token: Optional[int] = None,
    ) -> None:
        _check_backend("MoeAlltoAll", backend)
        warnings.warn(
            "MoeAlltoAll is deprecated; use flashinfer.moe_ep.NVLinkOneSidedAlltoAll", DeprecationWarning, stacklevel=2
        )
        for name, value in (("max_num_tokens", max_num_tokens), ("top_k", top_k), ("num_experts", num_experts)):
            if value <= 0:
                raise ArgumentError(f"MoeAlltoAll: {name} must be positive, got {value}")
        self.ep_rank, self.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.enable_rank_mask, self.eplb_stats_num_experts = enable_rank_mask, eplb_stats_num_experts
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ArgumentError("MoeAlltoAll: hidden_size or workspace_size_per_rank must be given, got neither")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size, top_k, max_num_tokens, hidden_size, 0, eplb_stats_num_experts
            )
        self.workspace_size_per_rank = workspace_size_per_rank
        if mnnvl_config is not None or MnnvlMemory.comm is None:
            MnnvlMemory.set_comm_from_config(mapping, mnnvl_config)
        comm = MnnvlMemory.get_comm(mapping)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # The ranks are part of the key: a process may be in several groups of one size.
        ranks = tuple(comm.allgather((socket.gethostname(), os.getpid())))
        owner = id(comm) if getattr(comm, "shares_objects", False) else None
        sizes = (workspace_size_per_rank, max_num_tokens, eplb_stats_num_experts, dispatch_bytes_per_token)
        key = (*sizes, self.ep_rank, self.ep_size, backend, where.type, ranks, owner)
        shared = _WORKSPACE_CACHE.get(key)
        if not all(comm.allgather(shared is not None and shared.memory.mapped)):  # one may have let go of it
            memory = MnnvlMemory(mapping, workspace_size_per_rank, comm=comm, device=where)
            table = memory.as_torch_strided_tensor(torch.uint8)
            meta = moe_a2a_initialize(table, self.ep_rank, self.ep_size, max_num_tokens, eplb_stats_num_experts)
            shares_device = memory.memory.provider == "local" and where.type == "cuda"
            blocks = (
                torch.cuda.get_device_properties(where).multi_processor_count // self.ep_size if shares_device else 0
            )
            waiting_for(table, self.ep_rank, comm=comm, max_blocks=max(blocks, int(shares_device)), is_new=True)
            if dispatch_bytes_per_token is not None:
                waiting_for(table, self.ep_rank).reserve(dispatch_bytes_per_token)
            comm.barrier()  # a row that is zeroed late would lose a flag of a peer
            shared = _WORKSPACE_CACHE[key] = _Shared(memory, table, meta)
        assert shared is not None
        self._shared = shared
        self._combine_offset: Optional[int] = None
        self._tokens = 0
        self.eplb_gathered_stats: Optional[torch.Tensor] = None

    @property
    def mnnvl_mem(self) -> MnnvlMemory:
        return self._shared.memory

    @property
    def workspace(self) -> torch.Tensor:
        return self._shared.workspace

    @property
    def metainfo(self) -> torch.Tensor:
        return self._shared.metainfo

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
    ) -> int:
        """Return the bytes of a rank for bfloat16 tokens with their experts and weights."""
        dispatch = 2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, dispatch, 2 * hidden_size, eplb_stats_num_experts
        )

    def _check(self, op: str, rows: int) -> None:
        if not self._shared.memory.mapped:
            raise RuntimeError(f"MoeAlltoAll.{op}: MNNVL handles are unmapped: the memory must be attached, got none")
        if rows > self.max_num_tokens:
            raise AssertionError(
                f"MoeAlltoAll.{op}: runtime_max_tokens_per_rank must be at most max_num_tokens = "
                f"{self.max_num_tokens}, got {rows}"
            )

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: Sequence[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: Optional[int] = None,
        expert_id_payload_index: Optional[int] = None,
        eplb_local_stats: Optional[torch.Tensor] = None,
        active_rank_mask: Optional[torch.Tensor] = None,
    ) -> list[torch.Tensor]:
        """Send tokens to the ranks of their experts and return what arrived; see :func:`moe_a2a_dispatch`.

        With ``invalid_token_expert_id`` the payload of expert numbers, ``expert_id_payload_index``, has this number in
        rows that no token arrived in.
        """
        self._check("dispatch", runtime_max_tokens_per_rank)
        if self._combine_offset is not None:
            raise AssertionError("MoeAlltoAll.dispatch: combine must be called first, got dispatch twice")
        views, offset, gathered = moe_a2a_dispatch(
            *(token_selected_experts, input_payloads, self.workspace, self.metainfo, runtime_max_tokens_per_rank),
            *(self.ep_rank, self.ep_size, self.top_k, self.num_experts, None, eplb_local_stats),
            *(self.enable_rank_mask, active_rank_mask),
            recv_view_cache=self._shared.views,
        )
        self._combine_offset, self._tokens = offset, token_selected_experts.shape[0]
        self.eplb_gathered_stats = gathered
        if invalid_token_expert_id is not None:
            if expert_id_payload_index is None:
                raise ArgumentError(
                    "MoeAlltoAll.dispatch: expert_id_payload_index must be given with invalid_token_expert_id, got None"
                )
            moe_a2a_sanitize_expert_ids(
                views[expert_id_payload_index], self.workspace, self.metainfo, self.ep_rank, invalid_token_expert_id
            )
        return views

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return where results are read from, ``(ep_size, runtime_max_tokens_per_rank, hidden_size)``."""
        if self._combine_offset is None:
            raise RuntimeError(
                "MoeAlltoAll.get_combine_payload_tensor_in_workspace: dispatch must be called first, got no dispatch"
            )
        nbytes = self.ep_size * runtime_max_tokens_per_rank * hidden_size * dtype.itemsize
        begin = self._combine_offset
        shape = (self.ep_size, runtime_max_tokens_per_rank)
        return moe_a2a_wrap_payload_tensor_in_workspace(
            self.workspace[self.ep_rank], shape, begin, begin + nbytes, dtype
        )

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: Optional[torch.dtype] = None,
        output_scales: Optional[torch.Tensor] = None,
        output_scalar_scale: float = 1.0,
        sf_layout: int = _LINEAR,
        output: Optional[torch.Tensor] = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the sums of the results of this rank's tokens; see :func:`moe_a2a_combine`."""
        self._check("combine", runtime_max_tokens_per_rank)
        if self._combine_offset is None:
            raise AssertionError("MoeAlltoAll.combine: dispatch must be called first, got combine")
        found = moe_a2a_combine(
            *(payload, self._tokens, self.workspace, self.metainfo, runtime_max_tokens_per_rank, self.ep_rank),
            *(self.ep_size, self.top_k, self._combine_offset, payload_in_workspace, output_dtype, output_scales),
            *(output_scalar_scale, sf_layout, output),
            use_low_precision=use_low_precision,
            enable_rank_mask=self.enable_rank_mask,
            active_rank_mask=active_rank_mask,
        )
        self._combine_offset = None
        return found

    def destroy(self) -> None:
        """Give the memory back, for all objects of this size; not collective."""
        self._shared.memory.close()
        self._shared.views.clear()  # views keep the mapping of shared memory of the host
        self._shared.workspace = self._shared.workspace.new_empty(0, 0)

    def checkpoint_prepare(self) -> None:
        """Raise: memory is not given back and taken again at the same addresses yet."""
        if self._combine_offset is not None:
            raise RuntimeError("MoeAlltoAll.checkpoint_prepare: combine must be called first, got an open dispatch")
        raise NotImplementedError(
            "MoeAlltoAll.checkpoint_prepare: the memory stays, as torch symmetric memory does; destroy this object and "
            "create another"
        )

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Raise, as :meth:`checkpoint_prepare` does."""
        if (comm_backend.Get_rank(), comm_backend.Get_size()) != (self.ep_rank, self.ep_size):
            raise RuntimeError(
                f"MoeAlltoAll.checkpoint_restore: comm_backend must be rank {self.ep_rank} of {self.ep_size}, got "
                f"{comm_backend.Get_rank()} of {comm_backend.Get_size()}"
            )
        self.checkpoint_prepare()
