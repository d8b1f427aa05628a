# SPDX-License-Identifier: Apache-2.0
"""Lock that serializes the calls on a wrapper: ``plan`` in one thread must not replace a plan that ``run`` reads.

A wrapper holds one :class:`CallLock`, ``_lock``. The lock also remembers the stream of the last call, because the same
place orders calls from different CUDA streams (streams.py). :func:`lock_methods` wraps the methods of a class.

A reentrant lock of Python takes 0.16 us a call, as much as all else that a repeated ``run`` may cost. Repeated calls
(``_repeat`` of the wrappers) therefore take the only element of a list, ``CallLock.free``, and put it back: 0.05 us.
``list.pop`` is atomic. All other calls hold the lock, which first replaces ``free`` by an empty list, so that no
repeated call begins, and then waits for the one that is under way.
"""

from __future__ import annotations

import _thread
import time
from typing import Any, Callable, TypeVar, cast

import torch

from .._runtime.codegen_wrapper import compiler, is_traced, parameters_of, wrap_with
from ..fi_trace import dump_parts
from . import streams

__all__ = ["CLOSED", "CallLock", "lock_methods", "new_with_lock", "one_at_a_time"]

C = TypeVar("C", bound=type)
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
    "_run_alone",
    "run_return_lse",
    "workspace_size",
)


_RLock: Any = _thread.RLock  # type checkers take it for a final class, which it is not
CLOSED: list[None] = []  #: ``free`` of a lock that is held; nothing is ever put into it


class CallLock(_RLock):
    """Reentrant lock whose holder also keeps repeated calls out; hold it with ``with`` or :func:`one_at_a_time`.

    A repeated call takes the element of ``free``. If ``free`` is CLOSED afterwards, it puts the element back and takes
    the lock instead: another thread holds the lock, or waits for the element to come back. Repeated calls are not
    nested: a signal handler must not call ``run`` of a wrapper whose ``run`` it interrupted.
    """

    __slots__ = ("_nested", "calls", "cuda_index", "free", "stream", "stream_object")

    def __init__(self) -> None:
        self.calls: list[None] = [None]
        self.free = self.calls  #: ``calls``, or CLOSED while the lock is held
        self._nested: list[bool] = []
        self.cuda_index: Any = None
        self.stream: Any = None
        self.stream_object: Any = None

    def follow_streams(self, device: torch.device) -> None:
        """Order later calls after the work of the current stream, if the device has streams."""
        streams.follow_streams(self, device)

    def twin(self) -> CallLock:
        """Return a free lock for a copy of the wrapper, with the same last stream."""
        result = CallLock()
        result.cuda_index, result.stream, result.stream_object = self.cuda_index, self.stream, self.stream_object
        return result

    def wait(self) -> None:
        """Wait for the end of the repeated call that has begun before ``free`` was closed."""
        pause = 1e-6
        while not self.calls:
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def __enter__(self) -> CallLock:
        self.acquire()
        self._nested.append(self.free is CLOSED)
        self.free = CLOSED
        try:
            self.wait()
        except BaseException:  # a signal handler raised it
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._nested.pop():
            self.free = self.calls
        self.release()


def one_at_a_time(method: F) -> F:
    """Hold the lock of a wrapper during a method, or a function whose first argument is the wrapper.

    Under torch.compile the method takes no lock; the op that the compiled program calls (``run_planned``) takes it. A
    method that dumps traces on request already has a wrapper. The two wrappers are merged into one function, because
    each wrapper costs 0.1 us per call.

    The lock is acquired and released by calls: a ``with`` statement takes twice as long. The statements have the same
    effect if a signal handler raises between any two of them: ``acquire`` may raise while it waits, without the lock.
    """
    func, dump, names = dump_parts(method)
    owner = parameters_of(func)[0].name
    body = f"""
        if _is_traced() or _compiler._is_compiling_flag:
            return _func({{arguments}})
        {dump}
        _lock, _calls = {owner}._lock, _closed
        try:
            _lock.acquire()
            _calls = _lock.free
            if _calls is not _closed:
                _lock.free = _closed
                if not _calls:
                    _lock.wait()
            _device = _lock.cuda_index
            if _device is not None and _streams.raw_stream(_device) != _lock.stream:
                _streams.enter({owner})
            _result = _func_by_position({{values}})
        except BaseException:
            if _lock._is_owned():
                if _calls is not _closed:
                    _lock.free = _calls
                _lock.release()
            raise
        if _calls is not _closed:
            _lock.free = _calls
        _lock.release()
        return _result
    """
    names = {**names, "_is_traced": is_traced, "_compiler": compiler, "_streams": streams, "_closed": CLOSED}
    return cast(F, wrap_with(func, body, names))


def new_with_lock(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``__new__`` of wrappers: make the object and its lock, before any method can be called."""
    self: Any = object.__new__(cls)
    self._lock = CallLock()
    return self


def lock_methods(cls: C) -> C:
    """Wrap the methods of a class that read or write a plan by :func:`one_at_a_time`, and return the class.

    Methods that ``_locked_inside`` names in the same class take the lock themselves, for a part of their work.
    """
    locked: dict[Any, Any] = {}  # one wrapper per method, even if the method has two names
    for name in _METHODS:
        method = vars(cls).get(name)
        if method is not None and name not in vars(cls).get("_locked_inside", ()):
            if method not in locked:
                locked[method] = one_at_a_time(method)
            setattr(cls, name, locked[method])
    return cls
