# SPDX-License-Identifier: Apache-2.0
"""Choice of the parametrisations that a lane runs, and how pytest-xdist distributes the tests over its workers."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any, Iterable, Optional, Sequence

import pytest

#: Files whose tests share no fixture and take seconds to minutes each: each test is scheduled by itself.
SPREAD = ("tests/cuda_compile/", "tests/docs/test_examples.py")

#: Files below SPREAD whose tests share what a fixture builds: two workers would build it twice.
TOGETHER = ("tests/cuda_compile/test_jit_cache_wheel.py", "tests/cuda_compile/test_tutorial.py")

#: What takes longest is started first, so that no worker is left with a long file at the end.
LONGEST_FIRST = (
    *("tests/cuda_compile/", "tests/attention/", "tests/docs/test_examples.py", "tests/serve/", "tests/jit/"),
    *(
        "tests/trace/",
        "tests/integrations/",
        "tests/docs/",
        "tests/packaging/",
        "tests/runtime/",
        "tests/benchmarks/",
        "tests/testing/",
    ),
    *("tests/test_drawn_calls.py", "tests/hopper/", "tests/fused_moe/", "tests/gemm/", "tests/mla/"),
    *("tests/recurrent/", "tests/comm/", "tests/sampling/"),
)

Values = tuple[tuple[str, object], ...]  #: name and value of each parameter of a test


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the items of each test function, by the identifier of the function."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return functions


def some(name: str, items: Sequence[pytest.Item], factor: float) -> list[pytest.Item]:
    """Return about ``factor * sqrt(k)`` of ``k`` parametrisations, the same ones every time."""
    count = min(len(items), math.ceil(factor * math.sqrt(len(items))))
    return random.Random(name).sample(items, count)


def _key(value: object) -> object:
    """Return what identifies a value of a parameter: its text, or the object if the text is an address."""
    text = repr(value)
    return id(value) if " at 0x" in text else text


def parameters(item: pytest.Item) -> list[list[str]]:
    """Return the names of each ``parametrize`` of a test, and of each fixture with parameters."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return []
    groups = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        groups.append([name.strip() for name in names.split(",")] if isinstance(names, str) else list(names))
    return groups + [[name] for name in callspec.params if not any(name in group for group in groups)]


def values(item: pytest.Item) -> Values:
    """Return the value of each parameter of a test. A row of a ``parametrize`` with several names is one value."""
    return tuple(
        (group[0], tuple(_key(item.callspec.params[name]) for name in group))  # type: ignore[attr-defined]
        for group in parameters(item)
    )


def pairwise(name: str, values: Sequence[Values]) -> list[int]:
    """Return positions in ``values`` such that every pair of values of two parameters that occurs is covered.

    The choice is greedy: the parametrisation that adds most new pairs is next; ties are resolved by a generator that is
    seeded with ``name``.
    """
    pairs = [set(itertools.combinations(one, 2)) or set(one) for one in values]
    order = random.Random(name).sample(range(len(values)), len(values))
    heap = [(-len(pairs[i]), rank, i) for rank, i in enumerate(order)]
    heapq.heapify(heap)
    covered: set[Any] = set()
    chosen = []
    while heap:
        claimed, rank, i = heapq.heappop(heap)
        new = pairs[i] - covered
        if -claimed != len(new):  # the heap holds an old count; counts only fall
            if new:
                heapq.heappush(heap, (-len(new), rank, i))
        elif new or not pairs[i]:
            chosen.append(i)
            covered |= new
    return sorted(chosen)


def choose(items: Sequence[pytest.Item], factor: Optional[float] = None) -> list[pytest.Item]:
    """Return the items of a run with ``--sample FACTOR`` or, without a factor, with ``--pairs``."""
    kept: set[pytest.Item] = set()
    for name, same in by_function(items).items():
        if factor:
            kept.update(some(name, same, factor))
        elif len(parameters(same[0])) < 3:
            kept.update(same)
        else:
            kept.update(same[i] for i in pairwise(name, [values(item) for item in same]))
    return [item for item in items if item in kept]


def longest_first(items: list[pytest.Item]) -> None:
    """Move the folders that take longest to the front; the order is otherwise as it was."""

    def rank(item: pytest.Item) -> int:
        return next((i for i, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path)), len(LONGEST_FIRST))

    items.sort(key=rank)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler of pytest-xdist that keeps the tests of a file on one worker, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.startswith(SPREAD) and file not in TOGETHER else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
