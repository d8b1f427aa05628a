# SPDX-License-Identifier: Apache-2.0
"""Copying of wrappers. A plan lives in memory that its wrapper owns, so a copy gets its own memory; if they shared it,
planning with one would overwrite the plan of the other.

A class takes the functions of this module as its special methods: ``__copy__ = copy_wrapper`` and so on. A copy has the
original's plan, and its own plan memory and lock. ``copy.copy`` shares the tensors that the caller passed (float
workspace, CUDA graph buffers), ``copy.deepcopy`` shares nothing. Two methods of the class, if it has them, take part:
``_copied_memory(memo, is_deep)`` registers in ``memo`` the tensors that replace the wrapper's tensors in the copy, and
``_begin_as_copy()`` resets, in the copy, the state that belongs only to the original.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NoReturn, SupportsIndex, TypeVar

import torch

from .locks import CallLock
from .streams import on_current_stream

__all__ = ["copy_wrapper", "deepcopy_wrapper", "refuse_pickling"]

_W = TypeVar("_W")


def copy_wrapper(wrapper: _W) -> _W:
    return _twin(wrapper, {}, False)


def deepcopy_wrapper(wrapper: _W, memo: dict[int, Any]) -> _W:
    return _twin(wrapper, memo, True)


def refuse_pickling(wrapper: Any, protocol: SupportsIndex) -> NoReturn:
    name = type(wrapper).__name__
    raise TypeError(
        f"{name}: cannot be pickled: it must be made and planned in the process that runs it, got a request to "
        "copy it to another (plans and workspaces belong to one process)"
    )


def _twin(wrapper: Any, memo: dict[int, Any], is_deep: bool) -> Any:
    known = memo.get(id(wrapper))
    if known is not None:
        return known
    result = object.__new__(type(wrapper))
    memo[id(wrapper)] = result
    with wrapper._lock:
        on_current_stream(wrapper)
        if hasattr(wrapper, "_copied_memory"):
            wrapper._copied_memory(memo, is_deep)
        for name, value in vars(wrapper).items():
            setattr(result, name, _part(value, memo, is_deep))
    if hasattr(result, "_begin_as_copy"):
        result._begin_as_copy()
    return result


def _part(value: Any, memo: dict[int, Any], is_deep: bool) -> Any:
    """Return the value of an attribute for the copy. Modules, native plans and numbers are read-only, hence shared."""
    if isinstance(value, torch.Tensor):
        return copy.deepcopy(value, memo) if is_deep else memo.get(id(value), value)
    if isinstance(value, CallLock):
        return value.twin()
    if isinstance(getattr(value, "__dict__", {}).get("_lock"), CallLock):  # a wrapper
        return _twin(value, memo, is_deep)
    if type(value) in (list, tuple):
        return type(value)(_part(x, memo, is_deep) for x in value)
    if type(value) is dict:
        return {key: _part(x, memo, is_deep) for key, x in value.items()}
    if type(value) is functools.partial:  # a plan function bound to the wrapper by a serving engine (fast_decode_plan)
        return functools.partial(value.func, *_part(value.args, memo, is_deep), **_part(value.keywords, memo, is_deep))
    return value
