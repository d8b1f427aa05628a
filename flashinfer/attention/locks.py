# SPDX-License-Identifier: Apache-2.0
"""One call at a time on a wrapper: ``plan`` in one thread would replace what ``run`` in another is reading."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, TypeVar

from ..wrapping import compiler, is_traced

__all__ = ["Serialised", "one_at_a_time"]

F = TypeVar("F", bound=Callable[..., Any])

#: Methods of wrappers that read or write a plan.
_METHODS = (
    "begin_forward",
    "forward",
    "forward_return_lse",
    "plan",
    "plan_alone",
    "plan_mask",
    "plan_with",
    "reset_workspace_buffer",
    "run",
    "run_return_lse",
    "workspace_size",
)


def one_at_a_time(method: F) -> F:
    """A method of a :class:`Serialised` object, or a function that takes one first, that holds the object's lock.

    Costs about three and a half plain calls of Python. A program that torch.compile traces has no lock: the op it calls
    takes it (``run_planned``).
    """

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or compiler._is_compiling_flag:
            return method(self, *args, **kwargs)
        lock = self._lock
        lock.acquire()
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.release()

    return locked  # type: ignore[return-value]


class Serialised:
    """Base of objects whose calls wait for each other. Calls of the thread that has the lock do not wait."""

    _lock: Any  #: a threading.RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self._lock = threading.RLock()
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        locked: dict[Any, Any] = {}  # a method may have two names
        for name in _METHODS:
            method = vars(cls).get(name)
            if method is not None:
                if method not in locked:
                    locked[method] = one_at_a_time(method)
                setattr(cls, name, locked[method])
