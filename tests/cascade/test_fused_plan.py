# SPDX-License-Identifier: Apache-2.0
"""Plans of two work lists for one launch: the splits of each row cover the keys of its requests, in a graph too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.jit import gen_jit_spec


@functools.cache
def module() -> Any:
    source = Path(__file__).parent / "fused_plan_module.cu"
    return gen_jit_spec("test_cascade_fused_plan_cpu", [source], backend="cpu").build_and_load()


def cut(rows: list[int], groups: int) -> list[int]:
    """Return the rows of each group of consecutive requests."""
    size = -(-len(rows) // groups)
    return [sum(rows[i : i + size]) for i in range(0, len(rows), size)]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 500, 3000]), min_size=40, max_size=40),
    st.integers(1, 4),
    st.sampled_from([(1, 1), (8, 2), (10, 2), (8, 8), (32, 1)]),
    st.sampled_from([1, 7, 132]),
    st.booleans(),
)
def test_parts_are_all_keys(rows, keys, groups, heads, blocks, is_graph):
    shared = cut(rows, groups)
    graph_rows = sum(rows) + 5 if is_graph else 0
    arguments = (shared, keys[-len(shared) :], rows, keys[: len(rows)], *heads, blocks, graph_rows)
    wrong, *sizes = module().check(*arguments)
    assert wrong == 0
    if is_graph:  # a later plan has other keys, and the same launch and buffers
        fewer = [max(0, n - 1) for n in rows]
        wrong, *later = module().check(
            cut(fewer, groups), keys[: len(shared)], fewer, keys[-len(rows) :], *arguments[4:]
        )
        assert wrong == 0 and later == sizes


def test_cascade_of_the_benchmark():
    """Check 64 requests that share 8k keys: almost every SM gets one block of each list, equally for each head."""
    _, float_bytes, _, narrow, wide = module().check([64], [8192], [1] * 64, [512] * 64, 32, 8, 132, 0)
    assert (narrow, wide) == (128, 128)
    assert float_bytes < 16 << 20
