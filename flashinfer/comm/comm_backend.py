# SPDX-License-Identifier: Apache-2.0
"""Backends through which ranks exchange Python objects: ``torch.distributed``, MPI, and the votes over any of them."""

from __future__ import annotations

import warnings
from typing import Any, Iterable, Optional

from .._runtime.knobs import knobs
from .abstractions import CommBackend

__all__ = ["CommBackend", "MPIBackend", "MpiComm", "TorchDistBackend", "lazy_import_mpi"]


def _split_partition(info: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Return the ranks of each colour, in colour order, sorted by (key, rank); ``info`` has (colour, key, rank)."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for color, key, rank in info:
        groups.setdefault(color, []).append((key, rank))
    return [[rank for _, rank in sorted(groups[color])] for color in sorted(groups)]


class TorchDistBackend(CommBackend):
    """Exchange of objects through a ``torch.distributed`` process group; the default group if none is given."""

    def __init__(self, group: Optional[Any] = None) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "TorchDistBackend: torch.distributed is not initialized; call torch.distributed.init_process_group"
            )
        self._dist, self._group = dist, group
        self._order: Optional[list[int]] = None  # torch's rank of each of our ranks, where the two differ

    def Get_rank(self) -> int:
        rank = self._dist.get_rank(self._group)
        return rank if self._order is None else self._order.index(rank)

    def Get_size(self) -> int:
        return self._dist.get_world_size(self._group)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        gathered: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered if self._order is None else [gathered[rank] for rank in self._order])

    def bcast(self, data: Any, root: int) -> Any:
        box = [data]
        root = root if self._order is None else self._order[root]
        source = root if self._group is None else self._dist.get_global_rank(self._group, root)
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """Return a backend for the ranks of one colour. Only the ranks of this group take part."""
        partition = _split_partition(self.allgather((color, key, self._dist.get_rank())))
        mine = next(ranks for ranks in partition if self._dist.get_rank() in ranks)
        if self.Get_size() == self._dist.get_world_size():
            group, _ = self._dist.new_subgroups_by_enumeration(partition)
        else:  # torch would wait for ranks outside of this group, which need not call Split
            group = self._dist.new_group(mine, use_local_synchronization=True)
        self.barrier()  # a rank that leaves earlier closes sockets to which slower ranks still connect (gloo)
        split = TorchDistBackend(group)
        if mine != sorted(mine):  # torch numbers the ranks of a group by their global ranks, whatever the keys
            split._order = [sorted(mine).index(rank) for rank in mine]
        return split


def lazy_import_mpi() -> Any:
    """Import and return ``mpi4py.MPI``."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            "MPIBackend: the package mpi4py must be installed (pip install mpi4py), or use TorchDistBackend"
        ) from error
    return MPI


class MpiComm:
    """The communicator of MPI that the package uses: ``COMM_WORLD``, or what :meth:`set_mpi_comm` was given.

    Attributes are those of the communicator. mpi4py is imported when the first one is read.
    """

    _comm: Any = None

    @classmethod
    def set_mpi_comm(cls, new_comm: Any) -> None:
        """Use another communicator from now on; None stands for ``COMM_WORLD``."""
        cls._comm = new_comm

    @classmethod
    def _get_mpi_comm(cls) -> Any:
        if cls._comm is None:
            cls._comm = lazy_import_mpi().COMM_WORLD
        return cls._comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get_mpi_comm(), name)


class MPIBackend(CommBackend):
    """Exchange of objects through MPI. mpi4py is imported by the first call."""

    def __init__(self) -> None:
        self._mpicomm: Any = MpiComm()

    def Get_rank(self) -> int:
        return self._mpicomm.Get_rank()

    def Get_size(self) -> int:
        return self._mpicomm.Get_size()

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self._mpicomm.allgather(data))

    def bcast(self, data: Any, root: int) -> Any:
        return self._mpicomm.bcast(data, root)

    def barrier(self) -> None:
        self._mpicomm.Barrier()

    def Split(self, color: int, key: int) -> MPIBackend:
        split = MPIBackend()
        split._mpicomm = self._mpicomm.Split(color, key)
        return split


def all_ranks_agree(comm: Any, local: bool) -> bool:
    """Return True if ``local`` is true on every rank of a backend; every rank must call this function."""
    return all(comm.allgather(bool(local)))


def all_ranks_support_mnnvl(
    local_supported: bool, world_size: int, comm_backend: Optional[Any] = None, group: Optional[Any] = None
) -> bool:
    """Return True if ``local_supported`` is true on each of ``world_size`` ranks; every rank must call this function.

    The ranks vote through ``comm_backend``; else through ``torch.distributed`` over ``group``; else through MPI.
    """
    if world_size <= 1:
        return bool(local_supported)
    comm = backend_for(comm_backend, group)
    if comm.Get_size() != world_size:
        warnings.warn(
            f"all_ranks_support_mnnvl: comm_backend must have world_size = {world_size} ranks, got {comm.Get_size()}; "
            "no memory is shared over multicast",
            stacklevel=2,
        )
        return False
    return all_ranks_agree(comm, local_supported)


def backend_for(comm_backend: Optional[Any], group: Optional[Any]) -> Any:
    """Return the backend of a call: the argument, else ``torch.distributed`` over ``group``, else MPI."""
    import torch.distributed as dist

    if comm_backend is not None:
        return comm_backend
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return TorchDistBackend(group)
    return MPIBackend()


def seconds_of(comm: Any) -> float:
    """Return how long a call waits: ``FLASHINFER_COMM_TIMEOUT_S``, else the time-out of the process group, else 600."""
    if knobs.comm_timeout_s is not None:
        return knobs.comm_timeout_s
    try:
        import torch
        import torch.distributed as dist

        group: Any = comm._group or dist.group.WORLD
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return 600.0
