# SPDX-License-Identifier: Apache-2.0
"""The table of an exchange of tokens: a row of bytes per rank, its sizes and offsets, and which ranks take part."""

from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError
from ...jit.codegen import module_cache
from ...jit.comm import gen_alltoall_module as gen_alltoall_module
from ..memory.waiting import waiting_for

__all__ = [
    "get_moe_alltoall_module",
    "moe_a2a_active_rank_mask",
    "moe_a2a_get_metainfo_index_pairs",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]

get_alltoall_module = module_cache(gen_alltoall_module)

#: Names of the entries of ``metainfo``, the order of ``Meta`` in include/flashinfer/comm/alltoall/params.h.
OFFSETS = (
    *("FLAG_VAL", "LOCAL_TOKEN_COUNTER", "SEND_COUNTERS", "RECV_COUNTERS", "DISPATCH_COMPLETION_FLAGS"),
    *("COMBINE_COMPLETION_FLAGS", "TOPK_TARGET_RANKS", "TOPK_SEND_INDICES", "EPLB_GATHERED_STATS", "PAYLOAD_DATA"),
)
PAYLOAD, MAX_TOKENS, EPLB_EXPERTS, ENTRIES = 9, 11, 12, 13
LINEAR = 2  # SfLayout.layout_linear


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
    return _AlltoallModule(get_alltoall_module(kind))


def moe_a2a_get_metainfo_index_pairs() -> tuple[list[str], list[int]]:
    """Return names of entries of ``metainfo`` and their indices."""
    return [f"MOE_A2A_{name}_OFFSET_INDEX" for name in OFFSETS], list(range(len(OFFSETS)))


def check_backend(op: str, backend: str) -> None:
    if backend == "cake":
        raise ArgumentError(f"{op}: backend='cake' requires compute capability 10.0 or 10.3 (Blackwell), got 'cake'")
    if backend != "trtllm":
        raise ArgumentError(f"{op}: Unknown MoE all-to-all backend: backend must be 'trtllm', got {backend!r}")


def pad128(nbytes: int) -> int:
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
    check_backend(op, backend)
    if not 1 <= ep_size <= 64:
        raise ArgumentError(f"{op}: ep_size must be from 1 to 64, got {ep_size}")
    aux = get_moe_alltoall_module().moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts)
    rows = ep_size * max_num_tokens
    return aux + pad128(rows * total_dispatch_payload_size_per_token) + pad128(rows * combine_payload_size_per_token)


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
    check_backend(op, backend)
    if workspace.dim() != 2 or workspace.dtype != torch.uint8 or workspace.shape[0] != ep_size:
        raise ArgumentError(
            f"{op}: workspace must be uint8 of ep_size = {ep_size} rows, got {workspace.dtype} {tuple(workspace.shape)}"
        )
    if not 0 <= ep_rank < ep_size <= 64:
        raise ArgumentError(f"{op}: ep_rank must be in [0, ep_size) and ep_size at most 64, got {ep_rank}, {ep_size}")
    metainfo = torch.empty(ENTRIES, dtype=torch.int64)
    module = get_moe_alltoall_module(workspace.device.type)
    module.moe_a2a_offsets(metainfo, ep_size, max_num_tokens, eplb_stats_num_experts)
    if int(metainfo[PAYLOAD]) > workspace.shape[1]:
        raise ArgumentError(
            f"{op}: workspace must have at least {int(metainfo[PAYLOAD])} bytes a rank for {max_num_tokens} tokens "
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


def active_ranks_of(op: str, enable: bool, mask: Optional[torch.Tensor], ep_rank: int, ep_size: int) -> int:
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
    check_backend("moe_a2a_wrap_payload_tensor_in_workspace", backend)
    row = workspace if workspace.dim() == 1 else workspace[0]
    return row[slice_start:slice_end].view(dtype).view(*leading_shape, -1)
