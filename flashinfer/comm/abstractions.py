# SPDX-License-Identifier: Apache-2.0
"""The interface through which ranks exchange Python objects."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["CommBackend"]


@runtime_checkable
class CommBackend(Protocol):
    """Interface through which engines lend their communicator; the method names are those of MPI.

    A class may inherit from it or merely have its methods. Set-up of this package calls ``Get_rank``, ``Get_size``,
    ``allgather`` and ``barrier`` only: in backends of engines ``bcast`` takes global ranks, and ``Split`` may return
    the backend itself.
    """

    def Get_rank(self) -> int:
        """Return the index of this rank in the group."""
        ...

    def Get_size(self) -> int:
        """Return the number of ranks in the group."""
        ...

    def allgather(self, data: Any) -> Any:
        """Gather the objects of all ranks, in rank order."""
        ...

    def bcast(self, data: Any, root: int) -> Any:
        """Return the object of rank ``root`` of the group on every rank."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def Split(self, color: int, key: int) -> Any:
        """Return a backend for the ranks that pass the same ``color``, ordered by ``key``."""
        ...
