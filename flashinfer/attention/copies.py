# SPDX-License-Identifier: Apache-2.0
"""Copying of wrappers. A plan lives in memory that its wrapper owns, so a copy gets its own memory; if they shared it,
planning with one would overwrite the plan of the other."""

from __future__ import annotations

import copy
import functools
from typing import Any, NoReturn, SupportsIndex, TypeVar

import torch

from .locks import CallLock, Serialised
from .streams import on_current_stream

__all__ = ["CopiedWithPlans"]

_W = TypeVar("_W", bound="CopiedWithPlans")


class CopiedWithPlans(Serialised):
    """Base of wrappers that can be copied: a copy has the original's plan, and its own plan memory and lock.

    ``copy.copy`` shares the tensors that the caller passed (float workspace, CUDA graph buffers), ``copy.deepcopy``
    shares nothing.
    """

    def __copy__(self: _W) -> _W:
        return _twin(self, {}, False)

    def __deepcopy__(self: _W, memo: dict[int, Any]) -> _W:
        return _twin(self, memo, True)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name}: cannot be pickled: it must be made and planned in the process that runs it, got a request to "
            "copy it to another (plans and workspaces belong to one process)"
        )

    def _copied_memory(self, memo: dict[int, Any], is_deep: bool) -> None:
        """Register in ``memo`` the tensors that replace this wrapper's tensors in the copy."""

    def _begin_as_copy(self) -> None:
        """Reset, in the copy, the state that belongs only to the original."""


def _twin(wrapper: _W, memo: dict[int, Any], is_deep: bool) -> _W:
    known = memo.get(id(wrapper))
    if known is not None:
        return known
    result = object.__new__(type(wrapper))
    memo[id(wrapper)] = result
    with wrapper._lock:
        on_current_stream(wrapper)
        wrapper._copied_memory(memo, is_deep)
        for name, value in vars(wrapper).items():
            setattr(result, name, _part(value, memo, is_deep))
    result._lock = CallLock()
    result._begin_as_copy()
    return result


def _part(value: Any, memo: dict[int, Any], is_deep: bool) -> Any:
    """Return the value of an attribute for the copy. Modules, native plans and numbers are read-only, hence shared."""
    if isinstance(value, torch.Tensor):
        return copy.deepcopy(value, memo) if is_deep else memo.get(id(value), value)
    if isinstance(value, CopiedWithPlans):
        return _twin(value, memo, is_deep)
    if type(value) in (list, tuple):
        return type(value)(_part(x, memo, is_deep) for x in value)
    if type(value) is dict:
        return {key: _part(x, memo, is_deep) for key, x in value.items()}
    if type(value) is functools.partial:  # a plan function bound to the wrapper by a serving engine (fast_decode_plan)
        return functools.partial(value.func, *_part(value.args, memo, is_deep), **_part(value.keywords, memo, is_deep))
    return value
