# SPDX-License-Identifier: Apache-2.0
"""top_k: selected elements and their order, for every kind of row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer import TopKTieBreak, top_k
from flashinfer._runtime.knobs import knobs
from flashinfer.trace.templates.topk import top_k_trace

from ..tensors import view_of_wider
from .inputs import DTYPES, KINDS, make

on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_any_kind = pytest.mark.parametrize("kind", KINDS)
ties = pytest.mark.parametrize("tie_break", list(TopKTieBreak), ids=str)

# Rows, columns, k: one element, all of them, rows that fit on chip, one that must be sampled, whole vocabularies, a k
# for which shared memory is too small.
SHAPES = [
    (0, 5, 2),
    (3, 1, 1),
    (2, 7, 7),
    (5, 111, 10),
    (2, 5000, 2500),
    (3, 20011, 64),
    (2, 128256, 2048),
    (1, 262144, 1),
    (1, 40000, 17000),
]


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether values are equal, NaN included."""
    return actual.dtype == expected.dtype and torch.equal(
        actual.float().nan_to_num(7e9), expected.float().nan_to_num(7e9)
    )


def check(x: torch.Tensor, k: int, **options: object) -> None:
    """Compare with the reference, which lists by index or by value; any order is right if neither was requested."""
    values, indices = top_k(x, k, **options)
    expected_values, expected = top_k_trace.reference(x, k, **options)
    assert values.shape == indices.shape == expected.shape and indices.dtype == torch.int64
    assert same(values, x.gather(1, indices)), "values belong to indices"
    if options.get("sorted") or options.get("deterministic"):
        assert torch.equal(indices, expected)
        assert same(values, expected_values)
    else:
        assert torch.equal(indices.sort(dim=1).values, expected.sort(dim=1).values)


@on_any_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"sorted": True}], ids=str)
def test_shapes(device, shape, dtype, options):
    rows, n, k = shape
    check(make("normal", rows, n, dtype, device), k, **options)


@on_any_kind
@on_any_dtype
@ties
@pytest.mark.parametrize(
    "shape", [(2, 6000, 300), (2, 41, 40), (1, 9000, 4500), (1, 9000, 300), (1, 9001, 2100)], ids=str
)
def test_kinds(device, kind, dtype, tie_break, shape):
    rows, n, k = shape
    x = make(kind, rows, n, dtype, device)
    for options in ({}, {"deterministic": True}, {"sorted": True}):
        check(x, k, tie_break=tie_break, **options)


@pytest.mark.parametrize("k", [1, 50, 2048])
def test_agrees_with_torch(device, k):
    x = torch.randn(4, 32000, device=device)
    values, indices = top_k(x, k, sorted=True)
    expected = torch.topk(x, k)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


@pytest.mark.parametrize("k", [10, 11, 1000])
def test_k_of_all_columns(device, k):
    x = torch.randn(3, 10, device=device)
    for options in ({}, {"deterministic": True}):
        values, indices = top_k(x, k, **options)
        assert torch.equal(values, x) and torch.equal(indices, torch.arange(10, device=device).expand(3, 10))
    values, indices = top_k(x, k, sorted=True)
    assert torch.equal(values, x.sort(dim=1, descending=True).values) and torch.equal(values, x.gather(1, indices))


@pytest.mark.parametrize("n, k", [(100, 30), (20000, 1000), (50000, 20000)])
def test_equal_rows_give_a_range_of_indices(device, n, k):
    x = torch.full((3, n), -2.5, device=device)
    small, large = torch.arange(k, device=device), torch.arange(n - k, n, device=device)
    for options in ({"deterministic": True}, {"sorted": True}, {"deterministic": True, "sorted": True}):
        assert torch.equal(top_k(x, k, tie_break=TopKTieBreak.SMALL, **options)[1], small.expand(3, k))
        assert torch.equal(top_k(x, k, tie_break=TopKTieBreak.LARGE, **options)[1], large.expand(3, k))


def test_no_columns(device):
    values, indices = top_k(torch.empty(3, 0, device=device), 4)
    assert values.shape == indices.shape == (3, 0)


@on_any_dtype
@pytest.mark.parametrize("pad, offset", [(3, 1), (8, 0), (13, 5)])
def test_strided_and_misaligned(device, dtype, pad, offset):
    x = make("normal", 4, 9001, dtype, device)
    check(view_of_wider(x, pad, offset, gap=torch.inf), 77, deterministic=True)


@pytest.mark.parametrize("algorithm", ["filtered", "multi_cta", "clusters", "cub", "default", ""])
@pytest.mark.parametrize("rows", [1, 5])
def test_algorithms(device, algorithm, rows):
    with knobs.override(topk_algo=algorithm):
        for kind in ("normal", "few values", "equal"):
            check(make(kind, rows, 20000, torch.float32, device), 500, sorted=True)
            check(make(kind, rows, 20000, torch.bfloat16, device), 500, tie_break=TopKTieBreak.LARGE)


def test_repeatable(device):
    x = make("few values", 8, 30000, torch.float32, device)
    first = top_k(x, 700, deterministic=True)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(top_k(x, 700, deterministic=True), first, strict=True))


@settings(max_examples=60)
@given(data=st.data())
def test_any_row(device, data):
    n = data.draw(st.one_of(st.integers(1, 300), st.integers(1, 20000)), label="columns")
    k = data.draw(st.one_of(st.integers(1, n), st.integers(1, min(n, 64))), label="k")
    kind, dtype = data.draw(st.sampled_from(list(KINDS)), label="kind"), data.draw(st.sampled_from(DTYPES))
    x = make(kind, data.draw(st.integers(0, 4), label="rows"), n, dtype, device)
    if data.draw(st.booleans(), label="strided"):
        x = view_of_wider(x, 5, data.draw(st.integers(0, 5), label="offset"), gap=torch.inf)
    options = {name: data.draw(st.booleans(), label=name) for name in ("sorted", "deterministic")}
    check(x, k, tie_break=data.draw(st.sampled_from(list(TopKTieBreak)), label="ties"), **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(x):
        values, indices = top_k(x * 2, 20, sorted=True, tie_break=TopKTieBreak.LARGE)
        return values + 1, indices

    x = torch.randn(3, 5000, device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(x)
    assert all(torch.equal(a, b) for a, b in zip(compiled, model(x), strict=True))


def test_names():
    assert flashinfer.topk.topk is flashinfer.top_k is flashinfer.topk.top_k
    assert [str(tie) for tie in TopKTieBreak] == ["none", "small", "large"]
    assert flashinfer.topk.can_implement_filtered_topk() is True
    assert flashinfer.topk.roundup_kbyte(1025) == 2048
    assert flashinfer.topk.can_use_clusters_topk() is False
    assert flashinfer.jit.gen_topk_module().name == "topk"
    for name in ("topk_clusters_exact", "topk_clusters_page_table_transform", "topk_clusters_ragged_transform"):
        with pytest.raises(flashinfer.utils.BackendSupportedError, match=f"{name}: needs"):
            getattr(flashinfer.topk, name)(torch.ones(2, 2), 1)
