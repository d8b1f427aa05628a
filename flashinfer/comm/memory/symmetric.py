# SPDX-License-Identifier: Apache-2.0
"""Memory of every rank under addresses that programs hand to their own kernels (SymmDeviceMemory, McastGPUBuffer)."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from ..._runtime.errors import ArgumentError
from ..comm_backend import MPIBackend
from .peers import create_peer_memory

__all__ = ["McastGPUBuffer", "SymmDeviceMemory"]

_SIGNAL_PAD_BYTES = 2048
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class SymmDeviceMemory:
    """``buf_size`` bytes of each rank and a pad for signals, mapped by all ranks of a group.

    Every rank makes it, and all succeed or none does. The memory begins as zeros. Where there is no GPU it is shared
    memory of the host.

    Parameters
    ----------
    buf_size : int
        Bytes of each rank; rounded up, with the pad, to the granularity of the device.
    group_size, group_rank : int
        Ranks of the group, and this one.
    device_idx : int
        The CUDA device.
    comm_backend_for_handle_transfer : CommBackend, optional
        The group; default: MPI.
    enable_multicast : bool
        True raises RuntimeError: this package sets up no multicast memory.
    allocate_signal_pads : bool
        Whether the last 2048 bytes are a pad of signals.
    device : optional
        Another kind of device, ``"cpu"``.
    """

    SIGNAL_PAD_SIZE = _SIGNAL_PAD_BYTES

    def __init__(
        self,
        buf_size: int,
        group_size: int,
        group_rank: int,
        device_idx: int,
        comm_backend_for_handle_transfer: Optional[Any] = None,
        enable_multicast: bool = True,
        allocate_signal_pads: bool = True,
        *,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        op = "SymmDeviceMemory"
        if enable_multicast:
            raise RuntimeError(
                f"[{op}] Device does not support multicasting. This package sets up no multicast memory: "
                "enable_multicast must be False, got True"
            )
        if buf_size <= 0:
            raise ArgumentError(f"{op}: buf_size must be positive, got {buf_size}")
        comm = MPIBackend() if comm_backend_for_handle_transfer is None else comm_backend_for_handle_transfer
        where = torch.device(device or (f"cuda:{device_idx}" if torch.cuda.is_available() else "cpu"))
        unit = 2 << 20 if where.type == "cuda" else 4096

        def prepare() -> None:
            if (comm.Get_size(), comm.Get_rank()) != (group_size, group_rank):
                raise ArgumentError(
                    f"{op}: group_size and group_rank must be those of comm_backend_for_handle_transfer "
                    f"({comm.Get_size()} and {comm.Get_rank()}), got {group_size} and {group_rank}"
                )

        self.device_idx, self.buf_size = device_idx, buf_size
        self._nbytes = -(-(buf_size + _SIGNAL_PAD_BYTES) // unit) * unit
        self.memory = create_peer_memory(
            comm, self._nbytes, where, op=op, initialise=lambda own: own.zero_(), prepare=prepare
        )
        ptrs = torch.tensor(self.memory.ptrs, dtype=torch.int64)
        self._ptrs_dev = ptrs.to(where)
        self._pads = [ptr + self.get_usable_buffer_size() for ptr in self.memory.ptrs] if allocate_signal_pads else []
        self._pads_dev = torch.tensor(self._pads, dtype=torch.int64, device=where)

    @property
    def mapped(self) -> bool:
        return not self.memory.closed

    @property
    def buf_addr(self) -> int:
        return self.memory.ptrs[self.memory.rank]

    def get_buffer_ptrs_host(self) -> list[int]:
        """Return the address of each rank's memory."""
        return list(self.memory.ptrs)

    def get_signal_pad_ptrs_host(self) -> list[int]:
        """Return the address of each rank's pad; empty without pads."""
        return list(self._pads)

    def get_buffer_ptrs_dev(self) -> int:
        """Return where the addresses lie on the device, 64 bits each."""
        return self._ptrs_dev.data_ptr()

    def get_signal_pad_ptrs_dev(self) -> int:
        """Return where the addresses of the pads lie on the device; 0 without pads."""
        return self._pads_dev.data_ptr()

    def get_unicast_ptr(self, rank: int) -> int:
        """Return the address of a rank's memory."""
        if not 0 <= rank < self.memory.world_size:
            raise ArgumentError(
                f"SymmDeviceMemory.get_unicast_ptr: rank out of range: it must be in [0, {self.memory.world_size}), "
                f"got {rank}"
            )
        return self.memory.ptrs[rank]

    def get_multicast_ptr(self) -> int:
        """Return 0: there is no multicast address."""
        return 0

    def get_rank(self) -> int:
        return self.memory.rank

    def get_world_size(self) -> int:
        return self.memory.world_size

    def get_allocation_size(self) -> int:
        """Return the bytes of each rank, the pad included."""
        return self._nbytes

    def get_usable_buffer_size(self) -> int:
        """Return the bytes in front of the pad."""
        return self._nbytes - _SIGNAL_PAD_BYTES

    def lamport_initialize(self, rank: int, dtype: torch.dtype) -> None:
        """Fill this rank's bytes in front of the pad with -0.0 of a dtype."""
        op = "SymmDeviceMemory.lamport_initialize"
        if dtype not in _FLOATS:
            raise ArgumentError(f"{op}: Unsupported dtype: it must be float16, bfloat16 or float32, got {dtype}")
        if rank != self.memory.rank:
            raise ArgumentError(f"{op}: rank must be {self.memory.rank} (this one), got {rank}")
        self.memory.own[: self.get_usable_buffer_size()].view(dtype).fill_(-0.0)

    def close(self) -> None:
        """Give the memory back; not collective, and safe to repeat."""
        self.memory.close()

    def __del__(self) -> None:
        memory = getattr(self, "memory", None)
        if memory is not None:
            memory.close()


class McastGPUBuffer:
    """A buffer that is written on all GPUs at once (multicast). This package sets up no such memory: creation raises.

    Engines catch the error and take kernels without multicast.
    """

    def __init__(
        self,
        buf_size: int,
        group_size: int,
        group_rank: int,
        device: torch.device,
        comm_backend_for_handle_transfer: Optional[Any] = None,
    ) -> None:
        raise RuntimeError(
            "[SymmDeviceMemory] Device does not support multicasting. McastGPUBuffer: needs multicast memory, which "
            "this package does not set up; SymmDeviceMemory(enable_multicast=False) has the addresses of all ranks"
        )
