# SPDX-License-Identifier: Apache-2.0
"""Memory in which every rank has a row, communicators that set it up, and probes of what GPUs can share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .abstractions import CommBackend
from .comm_backend import MPIBackend, MpiComm, TorchDistBackend, all_ranks_agree, all_ranks_support_mnnvl, backend_for
from .mapping import Mapping
from .memory.handles import (
    HandleExchanger,
    handle_allgather,
    handle_broadcast,
    handle_cleanup,
    handle_close,
    make_handle_exchanger,
)
from .memory.peers import PeerMemory, create_peer_memory
from .memory.probes import is_mnnvl_fabric_supported, is_multicast_supported
from .memory.strided import pack_strided_memory
from .memory.symmetric import McastGPUBuffer, SymmDeviceMemory

__all__ = [
    "CommBackend",
    "HandleExchanger",
    "MPIBackend",
    "McastGPUBuffer",
    "MnnvlConfig",
    "MnnvlMemory",
    "MpiComm",
    "SymmDeviceMemory",
    "TorchDistBackend",
    "all_ranks_agree",
    "all_ranks_support_mnnvl",
    "alloc_and_copy_to_cuda",
    "create_tensor_from_cuda_memory",
    "handle_allgather",
    "handle_broadcast",
    "handle_cleanup",
    "handle_close",
    "is_mnnvl_fabric_supported",
    "is_multicast_supported",
    "make_handle_exchanger",
    "pack_strided_memory",
    "round_up",
]


@dataclass
class MnnvlConfig:
    """Settings of memory shared between nodes."""

    comm_backend: Optional[CommBackend] = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


def round_up(val: int, gran: int) -> int:
    """Return the smallest multiple of ``gran`` that is at least ``val``."""
    return (val + gran - 1) // gran * gran


class MnnvlMemory:
    """A table with a row of ``size`` bytes per rank, at one stride in every process.

    Every rank of the communicator makes it at the same time. On CPU tensors the rows are shared memory of the host.

    Parameters
    ----------
    mapping : Mapping
        Its ranks of one pipeline stage and context-parallel rank share the memory.
    size : int
        Bytes of a row, the same on all ranks.
    comm : CommBackend, optional
        The ranks, instead of those that :meth:`set_comm_from_config` chose for the class.
    device
        Default: the current CUDA device, or the CPU where there is none.
    """

    comm: Optional[Any] = None
    config: Optional[MnnvlConfig] = None
    allocated_map: ClassVar[dict[int, MnnvlMemory]] = {}
    dev_id: Optional[int] = None

    def __init__(
        self,
        mapping: Mapping,
        size: int,
        *,
        comm: Optional[Any] = None,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        self.mapping, self.segment_size = mapping, size
        config = MnnvlMemory.config or MnnvlConfig()
        comm = comm if comm is not None else self.get_comm(mapping)
        self._comm = comm  # caches know a group by its address, which must not become another object's
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.rank_stride = round_up(size, config.fabric_page_size)
        if device.type == "cpu" or getattr(comm, "shares_objects", False):
            self.rank_stride = round_up(size, 4096)  # one tensor of a process has room for all rows
        try:
            self.memory: PeerMemory = create_peer_memory(
                comm, size, device, op="MnnvlMemory", initialise=lambda own: own.zero_(), stride=self.rank_stride
            )
        except ArgumentError as error:
            if "nbytes must be equal" not in str(error):
                raise
            raise ArgumentError(f"Not all rank allocating same size. {error}") from None
        self.ptr = self.memory.ptrs[0]
        MnnvlMemory.allocated_map[self.ptr] = self

    @property
    def mapped(self) -> bool:
        return not self.memory.closed

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the table as ``(ranks, size // itemsize)``; it must not be used after :meth:`close`."""
        return self.memory.rows(dtype)

    def close(self) -> None:
        """Give the memory back; not collective, and safe to repeat."""
        MnnvlMemory.allocated_map.pop(self.ptr, None)
        self.memory.close()

    @staticmethod
    def initialize() -> None:
        """Remember the current device, which is that of all memory of this process."""
        if torch.cuda.is_available():
            MnnvlMemory.dev_id = torch.cuda.current_device()

    @classmethod
    def set_comm_from_config(cls, mapping: Mapping, config: Optional[MnnvlConfig] = None) -> None:
        """Choose the ranks of memory made later: those of the pipeline stage and context rank of ``mapping``."""
        cls.config = config or MnnvlConfig()
        cls.comm = cls.comm_of(mapping, cls.config)

    @staticmethod
    def comm_of(mapping: Mapping, config: Optional[MnnvlConfig] = None) -> Any:
        """Return the ranks of the pipeline stage and context rank of ``mapping``, and keep nothing.

        Ranks that are threads of one process share the class: what one of them writes there, another would read.
        """
        comm = backend_for(None if config is None else config.comm_backend, None)
        color = mapping.pp_rank * mapping.cp_size + mapping.cp_rank
        whole = comm.Get_size() == mapping.world_size and mapping.tp_size == mapping.world_size
        return comm if whole else comm.Split(color, mapping.tp_rank)

    @classmethod
    def get_comm(cls, mapping: Mapping) -> Any:
        """Return the ranks that share memory."""
        if cls.comm is None:
            cls.set_comm_from_config(mapping, cls.config)
        return cls.comm

    @staticmethod
    def supports_mnnvl() -> bool:
        """Return whether ranks of this process can share memory: GPUs with NVLink, or the CPU where there is no GPU."""
        return not torch.cuda.is_available() or MnnvlMemory.support_nvlink(True)

    @staticmethod
    def support_nvlink(need_all_up: bool = True) -> bool:
        """Return whether the links of the current GPU to its peers are there, as the driver reports peer access."""
        if not torch.cuda.is_available():
            return False
        own = torch.cuda.current_device()
        found = [torch.cuda.can_device_access_peer(own, i) for i in range(torch.cuda.device_count()) if i != own]
        return bool(found) and (all(found) if need_all_up else any(found))


def create_tensor_from_cuda_memory(ptr: int, shape: Sequence[int], dtype: torch.dtype, device_id: int) -> torch.Tensor:
    """Return device memory at an address as a tensor that owns nothing."""
    from .memory.cuda import tensor_at

    nbytes = math.prod(shape) * dtype.itemsize
    return tensor_at(ptr, nbytes, torch.device("cuda", device_id)).view(dtype).view(*shape)


def alloc_and_copy_to_cuda(host_ptr_array: Sequence[int]) -> Optional[int]:
    """Return where a copy of these addresses lies on the current GPU, for as long as the process; None for none."""
    if not host_ptr_array:
        return None
    _copied.append(torch.tensor(list(host_ptr_array), dtype=torch.int64, device="cuda"))
    return _copied[-1].data_ptr()


_copied: list[torch.Tensor] = []
