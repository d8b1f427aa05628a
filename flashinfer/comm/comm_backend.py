# SPDX-License-Identifier: Apache-2.0
"""The interface through which ranks exchange Python objects, and its form over ``torch.distributed``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Optional

__all__ = ["CommBackend", "TorchDistBackend"]


class CommBackend(ABC):
    """What engines implement to lend their communicator; names are those of MPI."""

    @abstractmethod
    def Get_rank(self) -> int:
        """The number of this rank in the group."""

    @abstractmethod
    def Get_size(self) -> int:
        """How many ranks the group has."""

    @abstractmethod
    def allgather(self, data: Any) -> Any:
        """The objects of all ranks, in their order."""

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """The object of rank ``root`` of the group."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """A backend for the ranks that give the same ``color``, ordered by ``key``."""


def _split_partition(info: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Ranks of each colour, colours in order; ``info`` has (colour, key, rank), and ranks go by (key, rank)."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for color, key, rank in info:
        groups.setdefault(color, []).append((key, rank))
    return [[rank for _, rank in sorted(groups[color])] for color in sorted(groups)]


class TorchDistBackend(CommBackend):
    """Objects through a process group of ``torch.distributed``; the default group without one."""

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
