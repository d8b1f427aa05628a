# SPDX-License-Identifier: Apache-2.0
"""Memory of every rank, visible to every rank: the one memory plane of all workspaces.

=========  ====================================================  ==================================================
provider   memory                                                used for
=========  ====================================================  ==================================================
``vmm``    allocations of the CUDA driver, passed as descriptors  GPUs of one host; the first choice
``ipc``    CUDA IPC handles                                       where ``vmm`` is refused
``host``   anonymous files (``memfd``), passed as descriptors     CPU tensors of processes on one host
``local``  tensors of one process                                 ranks that are threads or streams: tests, timing
=========  ====================================================  ==================================================

Kernels get the addresses and never learn which provider made them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import weakref
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, Sequence, Union

import torch

from ..._runtime.errors import ArgumentError
from ...version import __version__
from ..fd_exchange import FdExchange
from .strided import strided_rows
from .transaction import Transaction

__all__ = ["PeerMemory", "create_peer_memory"]


class Provider(Protocol):
    """Maker of one kind of memory. Every rank calls the methods in this order."""

    own: torch.Tensor  #: bytes of this rank, after :meth:`allocate`
    uses_descriptors: bool

    def reserve(self, rank: int, size: int, stride: int) -> None:
        """Put the memory of rank r at ``r * stride`` of one range of addresses, from now on."""
        ...

    def allocate(self, nbytes: int) -> Any:
        """Allocate this rank's memory and return its handle: a descriptor, or an object for all ranks."""
        ...

    def open(self, handle: Any, peer: int) -> int:
        """Map the memory behind the handle of another rank and return its address."""
        ...

    def settle(self) -> None:
        """Close what only the exchange needed; all ranks have the memory now."""
        ...

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        ...


def _free_memory() -> int:
    """Return the bytes that the host can still give to processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(fd: int, nbytes: int, at: int = 0) -> int:
    """Map a file, at an address of a range of ours if one is given; reserve addresses where ``fd`` is -1."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if fd >= 0 else 0
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    address = _libc().mmap(at or None, nbytes, protection, flags | (0x10 if at else 0), fd, 0)  # 0x10: MAP_FIXED
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(address)


def _owned(address: int, nbytes: int) -> torch.Tensor:
    """Return a mapping as a tensor: it lives as long as tensor and views. (``mmap.mmap`` keeps a file open.)"""
    owner = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(owner, _libc().munmap, address, nbytes).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


class HostProvider:
    """Shared memory of a host that no file system has a name for."""

    uses_descriptors = True

    def __init__(self, device: torch.device) -> None:
        self._nbytes, self._fd = 0, -1
        self._mapped: list[torch.Tensor] = []
        self.whole: Optional[torch.Tensor] = None  # the range of addresses of all ranks
        self._rank = self._stride = 0
        self.own = torch.empty(0, dtype=torch.uint8)

    def reserve(self, rank: int, size: int, stride: int) -> None:
        self.whole = _owned(_map(-1, size * stride), size * stride)
        self._rank, self._stride = rank, stride

    def _map(self, fd: int, rank: int) -> torch.Tensor:
        if self.whole is None:
            self._mapped.append(_owned(_map(fd, self._nbytes), self._nbytes))
        else:
            _map(fd, self._nbytes, self.whole.data_ptr() + rank * self._stride)
            self._mapped.append(self.whole[rank * self._stride :][: self._nbytes])
        return self._mapped[-1]

    def allocate(self, nbytes: int) -> int:
        if nbytes > (free := _free_memory()):  # the kernel would rather end processes than refuse the pages
            raise MemoryError(f"memory of a rank must fit in what the host has left ({free} bytes), got {nbytes}")
        self._nbytes = nbytes
        self._fd = os.memfd_create("flashinfer", os.MFD_CLOEXEC)
        os.posix_fallocate(self._fd, 0, nbytes)  # no memory left: an error here, instead of SIGBUS at the first access
        self.own = self._map(self._fd, self._rank)
        return self._fd

    def open(self, handle: int, peer: int) -> int:
        try:
            if os.fstat(handle).st_size != self._nbytes:
                raise RuntimeError(f"the memory must have {self._nbytes} bytes, got {os.fstat(handle).st_size}")
            return self._map(handle, peer).data_ptr()
        finally:
            os.close(handle)

    def settle(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        self.settle()
        self.own = torch.empty(0, dtype=torch.uint8)
        self._mapped.clear()
        self.whole = None


class LocalProvider:
    """Tensors of one process; its communicator passes objects, not copies (:class:`~.local_ranks.LocalComm`)."""

    uses_descriptors = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[torch.Tensor] = []
        self._place: Optional[tuple[int, int, int]] = None
        self.whole: Optional[torch.Tensor] = None
        self.own = torch.empty(0, dtype=torch.uint8)

    def reserve(self, rank: int, size: int, stride: int) -> None:
        self._place = (rank, size, stride)

    def allocate(self, nbytes: int) -> Optional[torch.Tensor]:
        if self._place is None:
            self.own = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            return self.own
        rank, size, stride = self._place
        if rank != 0:
            return None  # in the tensor of rank 0
        whole = torch.empty(size * stride, dtype=torch.uint8, device=self._device)
        self.take(whole, nbytes)
        return whole

    def take(self, whole: torch.Tensor, nbytes: int) -> None:
        """Use this rank's part of the tensor of rank 0."""
        assert self._place is not None
        rank, _, stride = self._place
        self.whole = whole
        self.own = whole[rank * stride :][:nbytes]

    def open(self, handle: Optional[torch.Tensor], peer: int) -> int:
        if self._place is not None:
            assert self.whole is not None
            return self.whole.data_ptr() + peer * self._place[2]
        assert handle is not None
        self._seen.append(handle)
        return handle.data_ptr()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.own = torch.empty(0, dtype=torch.uint8)
        self._seen.clear()
        self.whole = None


def _providers(name: str) -> Callable[[torch.device], Provider]:
    if name in ("vmm", "ipc"):
        from . import cuda

        return cuda.VmmProvider if name == "vmm" else cuda.IpcProvider
    return HostProvider if name == "host" else LocalProvider


def _host_name() -> str:
    """Return what processes have in common that can pass descriptors to each other."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot[:8]} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


class PeerMemory:
    """``nbytes`` bytes of each rank; ``ptrs[r]`` is the address of rank r's bytes in this process."""

    def __init__(
        self, provider_name: str, provider: Provider, ptrs: Sequence[int], rank: int, nbytes: int, stride: int
    ) -> None:
        self.stride = stride
        self.provider, self.ptrs, self.rank, self.nbytes = provider_name, tuple(ptrs), rank, nbytes
        self.world_size = len(self.ptrs)
        self.device = provider.own.device
        self._provider, self._pid, self.closed = provider, os.getpid(), False

    @property
    def own(self) -> torch.Tensor:
        """The bytes of this rank."""
        self.check("PeerMemory")
        return self._provider.own

    def rows(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return the memory of all ranks as ``(world_size, elements)``; of memory that was made with a ``stride``."""
        self.check("PeerMemory")
        whole = getattr(self._provider, "whole", None)
        if whole is not None:
            return whole.as_strided((self.world_size, self.nbytes), (self.stride, 1)).view(dtype)
        return strided_rows(self.ptrs[0], self.nbytes, self.stride, self.world_size, dtype, self.device)

    def check(self, op: str) -> None:
        """Raise where the memory cannot be used: after :meth:`close`, and in a forked child."""
        if self.closed:
            raise RuntimeError(f"{op}: the memory shared between ranks must be attached, got one that is not attached")
        if os.getpid() != self._pid:
            raise RuntimeError(f"{op}: the process must be the one that made the memory, got a fork of it")

    def close(self) -> None:
        """Unmap everything. Local: other ranks keep what they have mapped. Does nothing in a forked child."""
        if not self.closed and os.getpid() == self._pid:
            self.closed = True
            self._provider.close()


def create_peer_memory(
    comm: Any,
    nbytes: int,
    device: Union[str, torch.device],
    *,
    op: str = "create_peer_memory",
    initialise: Optional[Callable[[torch.Tensor], Any]] = None,
    provider: str = "",
    agreed: Optional[dict[str, Any]] = None,
    prepare: Optional[Callable[[], Any]] = None,
    stride: int = 0,
) -> PeerMemory:
    """Allocate memory on every rank of ``comm`` and show it to all; every rank calls it, and all succeed or none does.

    ``initialise`` is called with this rank's bytes and has finished on all ranks when the function returns. The values
    of ``agreed`` must be equal on all ranks. ``prepare`` is called first: where it raises, all ranks fail.
    ``provider``: one of the table above; default: what the device needs. With a ``stride`` the memory of rank r is at
    ``ptrs[0] + r * stride`` in every process, which ``ipc`` cannot do.
    """
    device = torch.device(device)
    if provider:
        names = [provider]
    elif getattr(comm, "shares_objects", False):
        names = ["local"]
    else:
        names = ["vmm", *([] if stride else ["ipc"])] if device.type == "cuda" else ["host"]
    for name in names[:-1]:
        try:
            return _create(comm, nbytes, device, op, initialise, name, agreed, prepare, stride)
        except ArgumentError:
            raise  # ranks do not fit each other: another provider does not help
        except Exception as error:  # the same on every rank, so all try the next one
            logging.getLogger("flashinfer").info("%s: %s is refused (%s); trying %s", op, name, error, names[-1])
    return _create(comm, nbytes, device, op, initialise, names[-1], agreed, prepare, stride)


def _create(
    comm: Any,
    nbytes: int,
    device: torch.device,
    op: str,
    initialise: Optional[Callable[[torch.Tensor], Any]],
    name: str,
    agreed: Optional[dict[str, Any]],
    prepare: Optional[Callable[[], Any]],
    stride: int,
) -> PeerMemory:
    with Transaction(comm, op) as transaction, contextlib.ExitStack() as open_now:
        rank, size = transaction.rank, transaction.size
        wanted = {"nbytes": nbytes, "device": device.type, "provider": name, "version": __version__, "ranks": size}
        wanted["stride"] = stride
        wanted.update(agreed or {})
        if name != "local":
            wanted["host"] = _host_name()

        def check() -> dict[str, Any]:
            if prepare is not None:
                prepare()
            return wanted

        transaction.stage("check arguments", check, lambda all_wanted: _compare(op, all_wanted))

        made: list[Any] = []  # provider, handle, exchange

        def allocate() -> Any:
            provider = _providers(name)(device)
            transaction.on_failure(provider.close)
            if stride:
                provider.reserve(rank, size, stride)
            made.extend([provider, provider.allocate(nbytes)])
            if not provider.uses_descriptors:
                return made[1]
            made.append(FdExchange(rank, size))
            open_now.callback(made[2].close)
            return made[2].bind()

        shared = transaction.stage("allocate memory", allocate)
        others = [peer for peer in range(size) if peer != rank]

        def send() -> None:
            if made[0].uses_descriptors:
                made[2].send(shared, dict.fromkeys(others, made[1]))

        transaction.stage("send descriptors", send)
        ptrs = [0] * size

        def open_peers() -> None:
            if stride and name == "local" and rank != 0:
                made[0].take(shared[0], nbytes)
            ptrs[rank] = made[0].own.data_ptr()
            for peer in others:
                ptrs[peer] = made[0].open(made[2].receive(peer) if made[0].uses_descriptors else shared[peer], peer)

        transaction.stage("map the memory of peers", open_peers)

        def write() -> None:
            if initialise is not None:
                initialise(made[0].own)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        transaction.stage("initialise memory", write)
        transaction.commit()
        made[0].settle()
        return PeerMemory(name, made[0], ptrs, rank, nbytes, stride)


def _compare(op: str, wanted: Sequence[dict[str, Any]]) -> None:
    """Raise if the ranks do not want the same, and tell who wants what."""
    for key in wanted[0]:
        by_value: dict[Any, list[int]] = {}
        for rank, one in enumerate(wanted):
            by_value.setdefault(one.get(key), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            hint = " (memory is shared within one host only; use NCCL between hosts)" if key == "host" else ""
            raise ArgumentError(f"{op}: {key} must be equal on all ranks{hint}, got {told}")
