# SPDX-License-Identifier: Apache-2.0
"""Appending unquantised rows, and the indices of a batch: values, layouts, edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from flashinfer.trace.templates.page import (
    append_paged_kv_cache_trace,
    append_paged_mla_kv_cache_trace,
    get_batch_indices_positions_trace,
    get_seq_lens_trace,
)

from ..tensors import randn
from .inputs import FORMS, LAYOUTS, clone, make_batch, make_cache, same, whole

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def expected_cache(k, v, batch, cache, layout):
    """Return the cache that the reference of the template for this layout and form gives."""
    template = append_paged_kv_cache_trace(paged_kv_cache=cache, kv_layout=layout)
    copy = tuple(map(packed, cache)) if isinstance(cache, tuple) else packed(cache)
    expected = template.reference(k, v, *batch.rows, copy, *batch.table, kv_layout=layout)
    assert expected is copy  # it writes to the cache that it is given
    return expected


def packed(x):
    return x.clone(memory_format=torch.contiguous_format)


def check_append(k, v, batch, cache, layout):
    expected, before = expected_cache(k, v, batch, cache, layout), whole(cache)
    assert append_paged_kv_cache(k, v, *batch.rows, cache, *batch.table, kv_layout=layout) is None
    assert same(cache, expected)
    return before


def test_reference_row_by_row():
    """Check the contract: row t goes to page kv_indices[kv_indptr[b] + p // page_size], entry p % page_size."""
    batch = make_batch([5, 0, 9], [3, 0, 9], 4, "cpu", padding=1)
    k, v = torch.randn(2, batch.nnz, 2, 8)
    cache = make_cache("NHD", "combined", batch.num_pages, 4, 2, 8, dtype=FP32, device="cpu")
    expected = cache.clone()
    for t, (b, p) in enumerate(zip(batch.batch_indices.tolist(), batch.positions.tolist(), strict=True)):
        if b >= 0:
            page = batch.kv_indices[batch.kv_indptr[b] + p // 4]
            expected[page, 0, p % 4], expected[page, 1, p % 4] = k[t], v[t]
    assert same(expected_cache(k, v, batch, cache, "NHD"), expected)
    swapped = expected_cache(k, v, batch, cache.transpose(2, 3), "HND")
    assert same(swapped.transpose(2, 3), expected)
    assert same(expected_cache(k, v, batch, tuple(cache.unbind(1)), "NHD"), expected)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, *FP8, torch.uint8], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append(device, layout, form, dtype):
    batch = make_batch([37, 0, 16, 3], [5, 0, 16, 3], 16, device, padding=2)
    k, v = (randn(batch.nnz, 8, 128, dtype=dtype, device=device) for _ in range(2))
    check_append(k, v, batch, make_cache(layout, form, batch.num_pages, 16, 8, 128, dtype=dtype, device=device), layout)


@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 64, 127])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(device, layout, page_size):
    batch = make_batch([300, 1, 77], [40, 1, 77], page_size, device)
    k, v = (randn(batch.nnz, 3, 64, dtype=BF16, device=device) for _ in range(2))
    cache = make_cache(layout, "combined", batch.num_pages, page_size, 3, 64, dtype=BF16, device=device)
    check_append(k, v, batch, cache, layout)


# Wide rows, rows that no vector divides, more heads than a block of threads handles, one element.
@pytest.mark.parametrize(
    "heads, dim, dtype",
    [
        (1, 1, FP16),
        (1, 128, BF16),
        (2, 80, BF16),
        (3, 111, BF16),
        (12, 128, FP16),
        (129, 8, BF16),
        (2, 512, BF16),
        (1, 4100, FP32),
        (5, 7, FP8[0]),
        (2, 6, FP16),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_sizes(device, layout, heads, dim, dtype):
    batch = make_batch([21, 6], [20, 3], 8, device)
    k, v = (randn(batch.nnz, heads, dim, dtype=dtype, device=device) for _ in range(2))
    cache = make_cache(layout, "combined", batch.num_pages, 8, heads, dim, dtype=dtype, device=device)
    check_append(k, v, batch, cache, layout)


@pytest.mark.parametrize("pad", [1, 2, 8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_cache(device, layout, form, pad):
    batch = make_batch([21, 6], [20, 3], 8, device)
    k, v = (randn(batch.nnz, 4, 64, dtype=BF16, device=device) for _ in range(2))
    cache = make_cache(layout, form, batch.num_pages, 8, 4, 64, dtype=BF16, device=device, pad=pad)
    before = check_append(k, v, batch, cache, layout)
    gaps = [t.view(BF16)[..., 64:] for t in before], [t.view(BF16)[..., 64:] for t in whole(cache)]
    assert all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(*gaps, strict=True)
    )


def test_keys_and_values_of_other_strides_and_sizes(device):
    """Check keys of 192 in a padded cache beside values of 128 in a packed one."""
    batch = make_batch([21, 6], [20, 3], 8, device)
    k, v = randn(batch.nnz, 4, 192, dtype=BF16, device=device), randn(batch.nnz, 4, 128, dtype=BF16, device=device)
    k_cache = randn(batch.num_pages, 8, 4, 200, dtype=BF16, device=device)[..., :192]
    v_cache = randn(batch.num_pages, 4, 8, 128, dtype=BF16, device=device).transpose(1, 2)
    check_append(k, v, batch, (k_cache, v_cache), "NHD")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows(device, layout):
    """Check 4096 rows and more, four per thread: an odd number, some without request, keys wider than values."""
    batch = make_batch([2500, 1600], [2500, 1597], 16, device, padding=2)
    k, v = (randn(batch.nnz, 3, dim, dtype=BF16, device=device) for dim in (40, 16))
    caches = tuple(
        make_cache(layout, "combined", batch.num_pages, 16, 3, dim, dtype=BF16, device=device)[:, 0] for dim in (40, 16)
    )
    check_append(k, v, batch, caches, layout)


def test_rows_of_a_packed_projection(device):
    """Check k and v as slices of one (tokens, q + k + v heads, head_dim) tensor."""
    batch = make_batch([21, 6], [20, 3], 8, device)
    qkv = randn(batch.nnz, 12, 64, dtype=BF16, device=device)
    cache = make_cache("NHD", "combined", batch.num_pages, 8, 2, 64, dtype=BF16, device=device)
    check_append(qkv[:, 8:10], qkv[:, 10:], batch, cache, "NHD")
    odd = randn(batch.nnz, 2, 65, dtype=BF16, device=device)[..., 1:]
    check_append(odd, qkv[:, 10:], batch, cache, "NHD")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_token_without_their_dimension(device, layout):
    batch = make_batch([5, 3], [5, 2], 1, device)
    k, v = (randn(batch.nnz, 4, 64, dtype=BF16, device=device) for _ in range(2))
    short = randn(batch.num_pages, 2, 4, 64, dtype=BF16, device=device)
    full = short.clone().unsqueeze(-3 if layout == "NHD" else -2)
    expected = expected_cache(k, v, batch, full, layout)
    append_paged_kv_cache(k, v, *batch.rows, short, *batch.table, layout)
    assert torch.equal(short, expected.view(short.shape))
    k_cache, v_cache = randn(2, batch.num_pages, 4, 64, dtype=BF16, device=device)
    append_paged_kv_cache(k, v, *batch.rows, (k_cache, v_cache), *batch.table, layout)
    written = batch.kv_indices[batch.kv_indptr[batch.batch_indices.long()] + batch.positions].long()
    assert torch.equal(k_cache[written], k) and torch.equal(v_cache[written], v)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8], ids=str)
def test_other_index_dtypes(device, dtype):
    batch = make_batch([21, 6], [20, 3], 8, device)
    k, v = (randn(batch.nnz, 2, 64, dtype=BF16, device=device) for _ in range(2))
    cache = make_cache("NHD", "combined", batch.num_pages, 8, 2, 64, dtype=BF16, device=device)
    expected = expected_cache(k, v, batch, cache, "NHD")
    rows, table = ([t.to(dtype) for t in tensors] for tensors in (batch.rows, batch.table))
    append_paged_kv_cache(k, v, *rows, cache, *table)
    assert same(cache, expected)


def test_nothing_to_append(device):
    cache = make_cache("NHD", "combined", 3, 8, 2, 64, dtype=BF16, device=device)
    before = cache.clone()
    none, indptr = torch.empty(0, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    rows = torch.empty(0, 2, 64, dtype=BF16, device=device)
    append_paged_kv_cache(rows, rows, none, none, cache, none, indptr, none)
    ckv, kpe = torch.zeros(3, 8, 512, device=device), torch.zeros(3, 8, 64, device=device)
    append_paged_mla_kv_cache(
        torch.empty(0, 512, device=device), torch.empty(0, 64, device=device), none, none, ckv, kpe, none, indptr, none
    )
    no_heads = torch.empty(3, 2, 8, 0, 64, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    append_paged_kv_cache(
        *torch.empty(2, 1, 0, 64, device=device), one, one, no_heads, one, torch.tensor([0, 1], device=device), one + 1
    )
    assert torch.equal(cache, before)


def test_rows_of_no_request_are_skipped(device):
    batch = make_batch([8], [8], 8, device)
    k, v = (randn(8, 2, 64, dtype=BF16, device=device) for _ in range(2))
    cache = make_cache("NHD", "combined", batch.num_pages, 8, 2, 64, dtype=BF16, device=device)
    before = cache.clone()
    append_paged_kv_cache(k, v, torch.full_like(batch.batch_indices, -1), batch.positions + 1000, cache, *batch.table)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    "ckv_dim, kpe_dim, dtype", [(512, 64, BF16), (512, 64, FP8[0]), (33, 7, FP16), (16, 128, FP32)]
)
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_mla(device, ckv_dim, kpe_dim, dtype, page_size):
    batch = make_batch([37, 0, 16, 3], [5, 0, 16, 3], page_size, device, padding=2)
    ckv, kpe = (randn(batch.nnz, dim, dtype=dtype, device=device) for dim in (ckv_dim, kpe_dim))
    # One buffer of 576 elements per token, as in engines, and two separate buffers.
    joint = randn(batch.num_pages, page_size, ckv_dim + kpe_dim, dtype=dtype, device=device)
    own = tuple(randn(batch.num_pages, page_size, dim, dtype=dtype, device=device) for dim in (ckv_dim, kpe_dim))
    for caches in ((joint[..., :ckv_dim], joint[..., ckv_dim:]), own):
        expected = append_paged_mla_kv_cache_trace.reference(ckv, kpe, *batch.rows, *map(packed, caches), *batch.table)
        assert append_paged_mla_kv_cache(ckv, kpe, *batch.rows, *caches, *batch.table) is None
        assert same(caches, expected)


@pytest.mark.parametrize("appended", [[3, 2], [0], [0, 4, 0, 0, 1], [1] * 300, [5] * 2000])
@pytest.mark.parametrize("padding", [0, 3])
def test_batch_indices_positions(device, appended, padding):
    indptr = flashinfer._runtime.enums.get_indptr(torch.tensor(appended, device=device)).to(torch.int32)
    seq_lens = torch.randint(5, 50, (len(appended),), dtype=torch.int32, device=device)
    nnz = sum(appended) + padding
    actual = get_batch_indices_positions(indptr, seq_lens, nnz)
    for one, other in zip(actual, get_batch_indices_positions_trace.reference(indptr, seq_lens, nnz), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other)


def test_batch_indices_positions_reuses_buffers(device):
    indptr, seq_lens = torch.tensor([0, 3, 5], device=device), torch.tensor([3, 8], device=device)
    buffers = torch.full((2, 6), 77, dtype=torch.int32, device=device)
    batch_indices, positions = get_batch_indices_positions(indptr, seq_lens, 6, buffers[0], buffers[1])
    assert batch_indices.data_ptr() == buffers.data_ptr()
    assert batch_indices.tolist() == [0, 0, 0, 1, 1, -1]
    assert positions.tolist() == [0, 1, 2, 6, 7, 0]
    nothing = get_batch_indices_positions(indptr, seq_lens, 0)
    assert [t.shape for t in nothing] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seq_lens(device, dtype):
    indptr = torch.tensor([0, 1, 1, 4], dtype=dtype, device=device)
    last = torch.tensor([3, 0, 16], dtype=dtype, device=device)
    lengths = get_seq_lens(indptr, last, 16)
    assert lengths.tolist() == [3, 0, 48] and lengths.dtype == dtype
    assert torch.equal(lengths, get_seq_lens_trace.reference(indptr, last, 16))
    assert get_seq_lens(indptr[:1], last[:0], 16).shape == (0,)


@settings(max_examples=60)
@given(data=st.data())
def test_any_batch_and_cache(device, data):
    """Check batch, page size, row size, dtype, layout, form: slots match the reference, gaps are unchanged."""
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), label="lengths")
    appended = [data.draw(st.integers(0, length), label="appended") for length in lengths]
    page_size = data.draw(st.integers(1, 20), label="page_size")
    heads, dim = data.draw(st.integers(1, 5), label="heads"), data.draw(st.integers(1, 40), label="dim")
    dtype = data.draw(st.sampled_from([BF16, FP32, *FP8]), label="dtype")
    layout, form = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(FORMS))
    pad = data.draw(st.integers(0, 9), label="pad")
    batch = make_batch(lengths, appended, page_size, device, padding=data.draw(st.integers(0, 2)))
    k, v = (randn(batch.nnz, heads, dim + pad, dtype=dtype, device=device)[..., :dim] for _ in range(2))
    cache = make_cache(layout, form, batch.num_pages, page_size, heads, dim, dtype=dtype, device=device, pad=pad)
    twin = clone(cache)
    check_append(k, v, batch, cache, layout)
    # For a contiguous source and a cache without gaps, the same bytes arrive.
    append_paged_kv_cache(k.contiguous(), v.contiguous(), *batch.rows, twin, *batch.table, layout)
    assert all(torch.equal(a, b) for a, b in zip(whole(cache), whole(twin), strict=True))
