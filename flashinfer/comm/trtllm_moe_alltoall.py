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
from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .exchange.one_sided import moe_a2a_combine, moe_a2a_dispatch, moe_a2a_sanitize_expert_ids
from .exchange.table import (
    LINEAR,
    check_backend,
    get_moe_alltoall_module,
    moe_a2a_active_rank_mask,
    moe_a2a_get_metainfo_index_pairs,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from .mapping import Mapping
from .memory.waiting import waiting_for
from .mnnvl import MnnvlConfig, MnnvlMemory

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

    _is_deprecated = True  # a filter of warnings would be that of all threads

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
        check_backend("MoeAlltoAll", backend)
        if self._is_deprecated:
            text = "MoeAlltoAll is deprecated; use flashinfer.moe_ep.NVLinkOneSidedAlltoAll"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
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
        if mnnvl_config is None:
            comm = MnnvlMemory.get_comm(mapping)
        else:
            comm = MnnvlMemory.comm_of(mapping, mnnvl_config)
            if not getattr(comm, "shares_objects", False):
                MnnvlMemory.comm, MnnvlMemory.config = (
                    comm,
                    mnnvl_config,
                )  # objects made without a configuration use them
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
        sf_layout: int = LINEAR,
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
