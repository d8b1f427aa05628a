# SPDX-License-Identifier: Apache-2.0
"""Published module of the two-sided exchange of tokens, and the calls of engines (:class:`MnnvlMoe`)."""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from .exchange.two_sided import (
    get_comm_alltoall_module,
    get_moe_comm_module,
    get_moe_commworkspace_size_per_rank,
    get_moe_prepare_workspace_size_per_rank,
    moe_comm,
    moe_comm_prepare_indices,
    moe_local_gather,
    moe_prepare,
    set_moe_max_usable_sm_count,
)
from .mapping import Mapping
from .memory.waiting import waiting_for
from .mnnvl import MnnvlConfig, MnnvlMemory

__all__ = [
    "MnnvlMoe",
    "MoEAlltoallInfo",
    "get_comm_alltoall_module",
    "get_moe_comm_module",
    "get_moe_commworkspace_size_per_rank",
    "get_moe_prepare_workspace_size_per_rank",
    "moe_comm",
    "moe_comm_prepare_indices",
    "moe_local_gather",
    "moe_prepare",
    "set_moe_max_usable_sm_count",
]


@dataclass
class MoEAlltoallInfo:
    """Indices of an exchange and of the way back."""

    local_gather_indices: Optional[torch.Tensor]
    send_rank_count_cumsum: torch.Tensor
    send_rank_local_indices: torch.Tensor
    recv_rank_count_cumsum: torch.Tensor
    recv_rank_local_indices: torch.Tensor
    backward_recv_rank_local_indices: torch.Tensor
    local_token_allocation_count: int


class MnnvlMoe:
    """The calls of an engine's expert-parallel layer; its two workspaces live as long as the process."""

    _memory: ClassVar[dict[tuple[Any, ...], MnnvlMemory]] = {}

    @staticmethod
    def _workspace(name: str, mapping: Mapping, config: Optional[MnnvlConfig], device: Any) -> torch.Tensor:
        warnings.warn(
            f"MnnvlMoe.{name} is deprecated; use flashinfer.moe_ep.NVLinkTwoSidedAlltoAll",
            DeprecationWarning,
            stacklevel=3,
        )
        # The workspace follows the communicator: engines pass a mapping whose moe_ep_size is 1.
        comm = MnnvlMemory.comm_of(mapping, config)
        world, rank = comm.Get_size(), comm.Get_rank()
        ranks = tuple(comm.allgather((socket.gethostname(), os.getpid())))
        key = (name, rank, ranks, id(comm) if getattr(comm, "shares_objects", False) else None)
        made = MnnvlMoe._memory.get(key)
        if not all(comm.allgather(made is not None and made.mapped)):
            nbytes = 8 * get_moe_commworkspace_size_per_rank(world)
            made = MnnvlMoe._memory[key] = MnnvlMemory(mapping, nbytes, comm=comm, device=device)
            waiting_for(made.as_torch_strided_tensor(torch.uint8), rank, comm=comm, is_new=True)
            comm.barrier()
        assert made is not None
        return made.as_torch_strided_tensor(torch.uint64)

    @staticmethod
    def get_moe_workspaces(
        mapping: Mapping, config: Optional[MnnvlConfig] = None, *, device: Union[str, torch.device, None] = None
    ) -> torch.Tensor:
        """Return the memory of exchanges, ``(ranks, words)``; every rank calls it."""
        return MnnvlMoe._workspace("get_moe_workspaces", mapping, config, device)

    @staticmethod
    def get_moe_prepare_workspace(
        mapping: Mapping, config: Optional[MnnvlConfig] = None, *, device: Union[str, torch.device, None] = None
    ) -> torch.Tensor:
        """Return the memory of preparations, ``(ranks, words)``; every rank calls it."""
        return MnnvlMoe._workspace("get_moe_prepare_workspace", mapping, config, device)

    @staticmethod
    def compute_target_rank_id(token_selected_experts: torch.Tensor, expert_count: int, ep_size: int) -> torch.Tensor:
        """Return the rank of each expert."""
        if expert_count % ep_size:
            raise ArgumentError(
                f"MnnvlMoe.compute_target_rank_id: expert_count must be divisible by {ep_size}, got {expert_count}"
            )
        return token_selected_experts // (expert_count // ep_size)

    @staticmethod
    def mnnvl_moe_alltoallv_prepare_without_allgather(
        expert_ids: torch.Tensor,
        scales: Optional[torch.Tensor],
        expert_statics: Optional[torch.Tensor],
        workspace: torch.Tensor,
        max_token_count_per_rank: int,
        ep_rank: int,
        ep_size: int,
        expert_count: int,
        slot_count: int,
        top_k: int,
    ) -> tuple[MoEAlltoallInfo, torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Return what goes where, and slots, scales and statistics of the tokens that arrive: :func:`moe_prepare`."""
        local_ids, local_scales, send_sums, send, recv_sums, recv, backward, statistics = moe_prepare(
            *(expert_ids, scales, expert_statics, workspace, max_token_count_per_rank),
            *(ep_rank, ep_size, expert_count, slot_count, top_k),
        )
        rows = max_token_count_per_rank * ep_size
        info = MoEAlltoallInfo(None, send_sums, send, recv_sums, recv, backward, rows)
        return info, local_ids, local_scales, statistics

    @staticmethod
    def mnnvl_moe_alltoallv_prepare(
        gathered_target_rank_ids: torch.Tensor,
        real_rank_token_count_cumsum: Optional[torch.Tensor],
        gathered_expert_ids: torch.Tensor,
        gathered_scales: Optional[torch.Tensor],
        max_token_count_per_rank: int,
        expert_count: int,
        top_k: int,
        ep_rank: int,
        ep_size: int,
    ) -> tuple[MoEAlltoallInfo, torch.Tensor, Optional[torch.Tensor]]:
        """Return what goes where, and experts and scales of the tokens that arrive, from gathered tables."""
        indices = moe_comm_prepare_indices(
            gathered_target_rank_ids,
            real_rank_token_count_cumsum,
            *(max_token_count_per_rank, expert_count, top_k, ep_rank, ep_size),
        )
        rows = max_token_count_per_rank * ep_size
        info = MoEAlltoallInfo(*indices, rows)
        ids = gathered_expert_ids.new_empty(rows, top_k)
        scales = None if gathered_scales is None else gathered_scales.new_empty(rows, top_k)
        moe_local_gather(
            *(info.recv_rank_count_cumsum, indices[0], gathered_expert_ids, gathered_scales, ids, scales),
            *(max_token_count_per_rank, expert_count, top_k, ep_rank, ep_size),
        )
        return info, ids, scales

    @staticmethod
    def mnnvl_moe_alltoallv(
        x: torch.Tensor, alltoall_info: MoEAlltoallInfo, workspace: torch.Tensor, ep_rank: int, ep_size: int
    ) -> torch.Tensor:
        """Send rows ``(tokens, elements)`` to the ranks of their experts and return those that arrive, zeros behind."""
        padded, width = _whole_words(x)
        found = padded.new_zeros(alltoall_info.local_token_allocation_count, padded.shape[1])
        moe_comm(
            padded,
            alltoall_info.send_rank_count_cumsum,
            alltoall_info.send_rank_local_indices,
            found,
            alltoall_info.recv_rank_count_cumsum,
            alltoall_info.recv_rank_local_indices,
            *(workspace, ep_rank, ep_size),
        )
        return found[:, :width].contiguous().view(x.dtype)

    @staticmethod
    def mnnvl_moe_alltoallv_combine(
        x: torch.Tensor,
        alltoall_info: MoEAlltoallInfo,
        workspace: torch.Tensor,
        ep_rank: int,
        ep_size: int,
        top_k: int,
        token_count: int,
    ) -> torch.Tensor:
        """Send results back and add those of each token, in float32, rounded once; what no rank sends counts as 0."""
        if x.dim() != 2 or x.shape[0] != alltoall_info.local_token_allocation_count:
            raise ArgumentError(
                f"MnnvlMoe.mnnvl_moe_alltoallv_combine: x must have {alltoall_info.local_token_allocation_count} rows, "
                f"got {tuple(x.shape)}"
            )
        padded, width = _whole_words(x)
        found = padded.new_zeros(token_count * top_k, padded.shape[1])
        moe_comm(
            padded,
            alltoall_info.recv_rank_count_cumsum,
            alltoall_info.recv_rank_local_indices,
            found,
            alltoall_info.send_rank_count_cumsum,
            alltoall_info.backward_recv_rank_local_indices,
            *(workspace, ep_rank, ep_size),
        )
        parts = found[:, :width].contiguous().view(x.dtype).view(token_count, top_k, x.shape[1])
        return parts.float().sum(1).to(x.dtype)


def _whole_words(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bytes of rows, padded to a multiple of 16, and how many there were."""
    if x.dim() != 2:
        raise ArgumentError(f"MnnvlMoe.mnnvl_moe_alltoallv: x must be (tokens, elements), got {tuple(x.shape)}")
    width = x.shape[1] * x.element_size()
    rows = x.contiguous().view(torch.uint8) if x.numel() else x.new_empty(x.shape[0], width, dtype=torch.uint8)
    return torch.nn.functional.pad(rows, (0, -width % 16)), width
