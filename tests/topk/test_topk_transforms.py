# SPDX-License-Identifier: Apache-2.0
"""Selections as slots of a paged cache, of a ragged batch, and of rows of various lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer import TopKTieBreak, top_k_page_table_transform, top_k_ragged_transform, top_k_varlen
from flashinfer.trace.templates.topk import (
    top_k_page_table_transform_trace,
    top_k_ragged_transform_trace,
    top_k_varlen_trace,
)

from ..tensors import view_of_wider
from .inputs import DTYPES, KINDS, make

on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LENGTHS = [0, 1, 29, 30, 31, 2000, 9000, 8999]
K = 30


def int32(values, device: str) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, ordered: bool) -> None:
    assert actual.dtype == torch.int32
    if not ordered:  # padding (-1) comes last in any order
        left_over = actual == -1
        assert torch.equal(left_over, left_over.sort(dim=1).values)
        actual, expected = actual.sort(dim=1).values, expected.sort(dim=1).values
    assert torch.equal(actual, expected)


@on_any_dtype
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tie_break", list(TopKTieBreak), ids=str)
@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "masked"])
def test_ragged(device, dtype, deterministic, tie_break, kind):
    x = make(kind, len(LENGTHS), 9000, dtype, device)
    offsets, lengths = int32([1000 * i for i in range(len(LENGTHS))], device), int32(LENGTHS, device)
    options = {"deterministic": deterministic, "tie_break": tie_break}
    expected = top_k_ragged_transform_trace.reference(x, offsets, lengths, K, **options)
    assert_same(top_k_ragged_transform(x, offsets, lengths, K, **options), expected, deterministic)
    starts = int32([9000 - length for length in LENGTHS], device)
    expected = top_k_ragged_transform_trace.reference(x, offsets, lengths, K, **options, row_starts=starts)
    actual = top_k_ragged_transform(x, offsets, lengths, K, **options, row_starts=starts)
    assert_same(actual, expected, deterministic)
    apart = view_of_wider(x, 7, 3, gap=torch.inf)  # vLLM selects in rows of a buffer that is wider than they are
    actual = top_k_ragged_transform(apart, offsets, lengths, K, **options, row_starts=starts)
    assert_same(actual, expected, deterministic)


@on_any_dtype
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("windows", [False, True])
def test_page_table(device, dtype, deterministic, page_size, windows):
    rows, options = len(LENGTHS), {"deterministic": deterministic, "page_size": page_size}
    x = view_of_wider(make("normal", rows, 9000, dtype, device), 7, 3, gap=torch.inf)
    table = int32(torch.randperm(5 * 9100)[: 5 * 9100].view(5, 9100), device)[:, : 9000 // page_size + 40]
    lengths = int32(LENGTHS, device)
    options["row_to_batch"] = int32([4, 0, 1, 2, 3, 4, 0, 1], device)
    if windows:
        options["row_starts"] = int32([9000 - length for length in LENGTHS], device)
        options["page_table_row_starts"] = int32(range(rows), device)
    expected = top_k_page_table_transform_trace.reference(x, table, lengths, K, **options)
    out, raw = (torch.full((rows, K), -7, dtype=torch.int32, device=device) for _ in range(2))
    result = top_k_page_table_transform(x, table, lengths, K, **options, out=out, out_raw_indices=raw)
    assert result is out
    assert_same(out, expected, deterministic)
    for row, length in enumerate(LENGTHS):
        valid = raw[row] >= 0
        assert valid.sum() == min(length, K) and torch.equal(valid, out[row] >= 0)
        first = row if windows else 0
        entries = first + raw[row][valid] // page_size
        slots = table[int(options["row_to_batch"][row])][entries] * page_size + raw[row][valid] % page_size
        assert torch.equal(slots, out[row][valid])


def test_page_table_without_options(device):
    x, lengths = torch.randn(3, 500, device=device), int32([500, 3, 100], device)
    table = int32(torch.randperm(1500).view(3, 500), device)
    expected = top_k_page_table_transform_trace.reference(x, table, lengths, 64)
    assert_same(top_k_page_table_transform(x, table, lengths, 64), expected, False)
    starts = int32([0, 17, 300], device)
    expected = top_k_page_table_transform_trace.reference(x, table, lengths, 64, row_starts=starts)
    assert_same(top_k_page_table_transform(x, table, lengths, 64, row_starts=starts), expected, False)


def test_short_windows_are_listed_in_order(device):
    x, lengths = torch.randn(2, 500, device=device), int32([5, 8], device)
    out = top_k_ragged_transform(x, int32([100, 200], device), lengths, 8)
    assert out.tolist() == [[100, 101, 102, 103, 104, -1, -1, -1], list(range(200, 208))]


def test_lengths_beyond_the_row_are_cut(device):
    x = torch.randn(2, 50, device=device)
    out = top_k_ragged_transform(x, int32([0, 0], device), int32([10**6, -3], device), 60)
    assert out[0].tolist() == [*range(50), *[-1] * 10] and (out[1] == -1).all()


@on_any_dtype
@pytest.mark.parametrize("next_n, compress_ratio", [(1, 1), (2, 1), (3, 4)])
@pytest.mark.parametrize("return_values", [False, True])
def test_varlen(device, dtype, next_n, compress_ratio, return_values):
    lengths = int32([1, 6, 5000 * compress_ratio, 9100 * compress_ratio], device)
    x = make("normal", 4 * next_n, 9000, dtype, device)
    sizes = {"next_n": next_n, "compress_ratio": compress_ratio}
    indices, values = top_k_varlen(x, lengths, 300, **sizes, return_values=return_values)
    assert torch.equal(indices, top_k_varlen_trace.reference(x, lengths, 300, **sizes))
    assert (values is not None) == return_values
    if return_values:
        assert torch.equal(values, x.gather(1, indices.long().clamp(min=0)).masked_fill(indices < 0, 0))
    assert list(top_k_varlen.suitable_auto_backends) == ["radix_cutlass"]
    out_indices, out_values = torch.empty_like(indices), torch.empty_like(x[:, :300])
    out_values = out_values.contiguous()
    result = top_k_varlen(x, lengths, 300, **sizes, out_indices=out_indices, out_values=out_values, skip_check=True)
    assert result[0] is out_indices and result[1] is out_values and torch.equal(out_indices, indices)


@settings(max_examples=40)
@given(data=st.data())
def test_any_window(device, data):
    n, k = data.draw(st.integers(1, 12000), label="columns"), data.draw(st.integers(1, 600), label="k")
    rows, dtype = data.draw(st.integers(0, 4), label="rows"), data.draw(st.sampled_from(DTYPES))
    x = make(data.draw(st.sampled_from(list(KINDS)), label="kind"), rows, n, dtype, device)
    starts = [data.draw(st.integers(0, n), label="start") for _ in range(rows)]
    lengths = [data.draw(st.integers(0, n - start), label="length") for start in starts]
    arguments = (x, int32(range(rows), device), int32(lengths, device), k)
    options = {"tie_break": data.draw(st.sampled_from(list(TopKTieBreak)), label="ties"), "deterministic": True}
    options["row_starts"] = int32(starts, device)
    assert_same(
        top_k_ragged_transform(*arguments, **options),
        top_k_ragged_transform_trace.reference(*arguments, **options),
        True,
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(x, table, numbers):
        slots = top_k_page_table_transform(x, table, numbers, 16, deterministic=True, page_size=2)
        ragged = top_k_ragged_transform(x, numbers, numbers, 16, deterministic=True)
        return slots * 2, ragged, top_k_varlen(x, numbers, 16, return_values=True)

    x, table = torch.randn(3, 500, device=device), int32(torch.randperm(900).view(3, 300), device)
    arguments = (x, table, int32([500, 3, 77], device))
    slots, ragged, varlen = torch.compile(model, fullgraph=True, backend=backend)(*arguments)
    expected = model(*arguments)
    assert torch.equal(slots, expected[0]) and torch.equal(ragged, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(varlen, expected[2], strict=True))


def test_varlen_names():
    from flashinfer.topk_varlen.kernels.config import GvrTopKLBConfig
    from flashinfer.topk_varlen.topk_varlen import _n_is_256bit_aligned, _top_k_varlen_heuristic

    assert flashinfer.top_k_varlen is flashinfer.topk_varlen.top_k_varlen
    x = torch.ones(1, 8)
    assert _top_k_varlen_heuristic(["radix_cutlass", "gvr"], x, x, 4) == ["gvr", "radix_cutlass"]
    assert _n_is_256bit_aligned(torch.float16, 16) and not _n_is_256bit_aligned(torch.float32, 12)
    assert GvrTopKLBConfig(max_batch_size=128).max_batch_size == 128
    for bad, text in (
        ({"max_batch_size": 100}, "power of 2"),
        ({"cluster_size": 3}, "cluster_size"),
        ({"num_threads": 7}, "num_threads"),
    ):
        with pytest.raises(ValueError, match=text):
            GvrTopKLBConfig(**bad)
