# SPDX-License-Identifier: Apache-2.0
"""The interface through which ranks exchange Python objects, and its form over ``torch.distributed``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Optional

__all__ = ["CommBackend", "TorchDistBackend"]


class CommBackend(ABC):
    """Interface through which engines lend their communicator; the method names are those of MPI."""

    @abstractmethod
    def Get_rank(self) -> int:
        """Return the index of this rank in the group."""

    @abstractmethod
    def Get_size(self) -> int:
        """Return the number of ranks in the group."""

    @abstractmethod
    def allgather(self, data: Any) -> Any:
        """Gather the objects of all ranks, in rank order."""

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """Return the object of rank ``root`` of the group on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Return a backend for the ranks that pass the same ``color``, ordered by ``key``."""


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
            raise RuntimeError("TorchDistBackend: torch.distributed must be initialized, got none")
        self._dist, self._group = dist, group

    def Get_rank(self) -> int:
        return self._dist.get_rank(self._group)

    def Get_size(self) -> int:
        return self._dist.get_world_size(self._group)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        gathered: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def bcast(self, data: Any, root: int) -> Any:
        box = [data]
        source = root if self._group is None else self._dist.get_global_rank(self._group, root)
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        partition = _split_partition(self.allgather((color, key, self._dist.get_rank())))
        group, _ = self._dist.new_subgroups_by_enumeration(partition)
        return TorchDistBackend(group)
