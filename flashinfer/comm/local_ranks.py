# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process: tests and timings on one device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, TypeVar

__all__ = ["LocalComm", "call_on_ranks", "local_comms"]

T = TypeVar("T")


class LocalComm:
    """A communication backend among threads; objects are passed, not copied."""

    shares_objects = True

    def __init__(self, rank: int, slots: list[Any], meeting: threading.Barrier) -> None:
        self._rank, self._slots, self._meeting = rank, slots, meeting

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._slots)

    def allgather(self, data: Any) -> list[Any]:
        self._slots[self._rank] = data
        self._meeting.wait()
        gathered = list(self._slots)
        self._meeting.wait()  # nobody writes again before all have read
        self._slots[self._rank] = None
        return gathered

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self._meeting.wait()

    def abort(self) -> None:
        """Let go of the ranks that wait for this one: they raise BrokenBarrierError."""
        self._meeting.abort()

    def Split(self, color: int, key: int) -> LocalComm:
        info = self.allgather((color, key, self._rank))
        ranks = [rank for _, _, rank in sorted(one for one in info if one[0] == color)]
        made = local_comms(len(ranks)) if ranks[0] == self._rank else None
        return self.allgather(made)[ranks[0]][ranks.index(self._rank)]


def local_comms(size: int) -> list[LocalComm]:
    """Return the backends of ``size`` ranks, each for a thread of its own."""
    slots, meeting = [None] * size, threading.Barrier(size)
    return [LocalComm(rank, slots, meeting) for rank in range(size)]


def call_on_ranks(size: int, function: Callable[[LocalComm], T]) -> list[T]:
    """Call ``function(comm)`` in ``size`` threads; return the results, or raise the exception of the lowest rank.

    Ranks that wait in the backend for one that has raised are let go.
    """

    def run(comm: LocalComm) -> T:
        try:
            return function(comm)
        except BaseException:
            comm.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        calls = [threads.submit(run, comm) for comm in local_comms(size)]
    failures = [call.exception() for call in calls]
    for failure in sorted(filter(None, failures), key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise failure
    return [call.result() for call in calls]
