# SPDX-License-Identifier: Apache-2.0
"""Depth of the wrapper classes: a reader of a wrapper looks at three classes at most."""

from __future__ import annotations

import inspect
import sys

import flashinfer
from flashinfer import cascade, mla, pod, sparse  # noqa: F401  # modules with wrappers
from flashinfer.attention.composite_wrapper import CompositeWrapper
from flashinfer.attention.locks import CallLock
from flashinfer.attention.wrapper import PlannedWrapper

LEVELS = 3  # a wrapper, its base, and the base of that


def wrappers() -> set[type]:
    """Return all classes of the package that own a plan, are made of such, or are called wrappers."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "flashinfer"]
    classes = {x for module in modules for x in list(vars(module).values()) if inspect.isclass(x)}
    return {
        x
        for x in classes
        if x.__module__.split(".")[0] == "flashinfer"
        and (issubclass(x, (PlannedWrapper, CompositeWrapper)) or x.__name__.endswith("Wrapper"))
    }


def test_no_wrapper_has_more_than_three_levels():
    found = wrappers()
    names = {x.__name__ for x in found}
    assert {"CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "Level", "_PrefillPart", "BatchAttention"} <= names
    assert len(found) >= 19
    levels = {x.__qualname__: len(x.__mro__) - 1 for x in found}  # object is no level
    assert {name: depth for name, depth in levels.items() if depth > LEVELS} == {}


def test_every_wrapper_has_one_base():
    """Check that no level is hidden in a second base class."""
    assert [x.__qualname__ for x in wrappers() if len(x.__bases__) != 1] == []


def test_methods_of_a_subclass_take_the_lock():
    """Check classes of callers: ``plan`` that a subclass replaces waits for other calls, too."""

    class Mine(flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self) -> bool:
            return self._lock.free == [] and self._lock._is_owned()

    mine = Mine.__new__(Mine)
    assert type(mine._lock) is CallLock and not mine._lock._is_owned()
    assert mine.plan() and not mine._lock._is_owned()
