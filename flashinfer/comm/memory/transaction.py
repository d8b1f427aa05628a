# SPDX-License-Identifier: Apache-2.0
"""Set-up that succeeds on all ranks or on none.

A transaction is a sequence of stages, the same on every rank. In each stage a rank does its part, catches its own
exception, and tells the others how it went. If any rank failed, all undo what they did, in reverse, and raise the same
exception, which names the first rank that failed. Every stage is one ``allgather``, also where it fails, so that a
failure cannot put ranks into different collectives.
"""

from __future__ import annotations

import builtins
from contextlib import ExitStack
from typing import Any, Callable, Optional, TypeVar

from ..._runtime.errors import ArgumentError

__all__ = ["Transaction"]

T = TypeVar("T")


def _class_of(name: str) -> type[Exception]:
    """Return the exception class with this name: ours or a built-in one, or RuntimeError for those of libraries."""
    known: Any = ArgumentError if name == "ArgumentError" else getattr(builtins, name, None)
    # Constructors of UnicodeError's subclasses take more than a text.
    is_plain = isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError)
    return known if is_plain else RuntimeError


class Transaction:
    """One set-up of the ranks of ``comm``; ``op`` names it in errors. Use as a context: leaving without
    :meth:`commit` undoes everything."""

    #: Tests replace it: called as (rank, stage) before each stage, and may raise.
    before_stage: Callable[[int, str], None] = staticmethod(lambda rank, stage: None)

    def __init__(self, comm: Any, op: str) -> None:
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._comm, self._op, self._undo = comm, op, ExitStack()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def on_failure(self, undo: Callable[..., Any], *arguments: Any) -> None:
        """Call ``undo`` if this transaction fails. The last one registered is called first."""
        self._undo.callback(undo, *arguments)

    def stage(self, name: str, work: Callable[[], T], agree: Optional[Callable[[list[T]], None]] = None) -> list[T]:
        """Run ``work`` on every rank and return what it returned on each of them, in rank order.

        What is returned must be picklable. ``agree`` gets that list on every rank and raises where the ranks do not
        fit each other: it must depend on the list alone, so that it raises everywhere or nowhere.
        """
        failure, value = None, None
        try:
            self.before_stage(self.rank, name)
            value = work()
        except Exception as error:
            failure, cause = (type(error).__name__, str(error)), error
        reports = list(self._comm.allgather((failure, value)))
        if len(reports) != self.size:
            raise RuntimeError(
                f"{self._op}: allgather must return one object per rank ({self.size}), got {len(reports)}"
            )
        for rank, (told, _) in enumerate(reports):
            if told is not None:
                text = f"{self._op}: rank {rank} failed to {name} ({told[1]}); all ranks gave back what they had"
                raise _class_of(told[0])(text) from (cause if rank == self.rank else None)
        values = [value for _, value in reports]
        if agree is not None:
            agree(values)
        return values

    def commit(self) -> None:
        """Keep what was made. A rank calls it after its last stage."""
        self._undo.pop_all()
