# SPDX-License-Identifier: Apache-2.0
"""Lock that serializes the calls on a wrapper: ``plan`` in one thread must not replace a plan that ``run`` reads.

The same place orders calls from different CUDA streams (streams.py).
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, Callable, TypeVar, cast

from .._runtime.codegen_wrapper import compiler, is_traced, wrap_with
from ..fi_trace import dump_parts
from . import streams

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
    """Hold the lock of a :class:`Serialised` object during a method, or a function whose first argument is the object.

    Under torch.compile the method takes no lock; the op that the compiled program calls (``run_planned``) takes it. A
    method that dumps traces on request already has a wrapper. The two wrappers are merged into one function, because
    each wrapper costs 0.1 us per call.

    The lock is acquired and released by calls: a ``with`` statement takes twice as long. The statements have the same
    effect if a signal handler raises between any two of them: ``acquire`` may raise while it waits, without the lock.
    """
    func, dump, names = dump_parts(method)
    owner = next(iter(inspect.signature(func).parameters))
    body = f"""
        if _is_traced() or _compiler._is_compiling_flag:
            return _func({{arguments}})
        {dump}
        _lock = {owner}._lock
        try:
            _lock.acquire()
            _device = {owner}._cuda_index
            if _device is not None and _streams.raw_stream(_device) != {owner}._stream:
                _streams.enter({owner})
            _result = _func_by_position({{values}})
        except BaseException:
            if _lock._is_owned():
                _lock.release()
            raise
        _lock.release()
        return _result
    """
    names = {**names, "_is_traced": is_traced, "_compiler": compiler, "_streams": streams}
    return cast(F, wrap_with(func, body, names))


class Serialised(streams.OnStreams):
    """Base of objects whose calls are serialized by a reentrant lock: nested calls in one thread do not wait.

    Calls are ordered on the device too, once ``_follow_streams`` was called.
    """

    _lock: Any  #: a threading.RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self._lock = threading.RLock()
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        locked: dict[Any, Any] = {}  # one wrapper per method, even if the method has two names
        for name in _METHODS:
            method = vars(cls).get(name)
            if method is not None:
                if method not in locked:
                    locked[method] = one_at_a_time(method)
                setattr(cls, name, locked[method])
