# SPDX-License-Identifier: Apache-2.0
"""Appending in NVFP4: codes, scales, slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.page import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from flashinfer.trace.templates.page import (
    nvfp4_quantize_append_paged_kv_cache_trace,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace,
)
from flashinfer.trace.templates.page_nvfp4 import quantize_nvfp4

from ..tensors import randn
from .inputs import FORMS, LAYOUTS, make_batch, same
from .nvfp4_caches import BF16, FP16, make_caches

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def expected_caches(trace, rows, where, caches, scales, table, layout):
    """Return the caches of the reference: four tensors for the pair forms, two for the combined form."""
    template = trace(paged_kv_cache=caches[0], kv_layout=layout)
    packed = [tuple(t.contiguous() for t in c) if isinstance(c, tuple) else c.contiguous() for c in caches]
    result = template.reference(*rows, *where, *packed, *table, *scales, heads_first=int(layout == "HND"))
    return result if len(result) == 2 else (result[:2], result[2:])


def check_append(rows, batch, caches, scales, layout):
    expected = expected_caches(
        nvfp4_quantize_append_paged_kv_cache_trace, rows, batch.rows, caches, scales, batch.table, layout
    )
    assert nvfp4_quantize_append_paged_kv_cache(*rows, *batch.rows, *caches, *batch.table, *scales, layout) is None
    assert same(caches[0], expected[0]) and same(caches[1], expected[1])


def check_mapped(rows, slots, caches, scales, layout):
    trace = nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace
    expected = expected_caches(trace, rows, (slots,), caches, scales, (), layout)
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*rows, slots, *caches, *scales, layout)
    assert same(caches[0], expected[0]) and same(caches[1], expected[1])


def test_reference_rounds_to_the_nearest_ties_to_even():
    """Check rounding by a search over all codes; a block whose largest magnitude is 6 has a scale of one."""
    x = torch.linspace(-6, 6, 4097)[:-1].view(-1, 16).clone()
    x[:, 0] = 6.0
    x[0, 1:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes, sf = quantize_nvfp4(x, torch.tensor(1.0))
    assert (sf.float() == 1).all()
    unpacked = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    assert torch.equal((unpacked >= 8), torch.signbit(x))
    distance = (VALUES - x.abs().unsqueeze(-1)).abs()
    chosen = distance.gather(-1, (unpacked.long() & 7).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(chosen, distance.amin(-1))
    assert (unpacked[0, 1:8] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append(device, layout, form, dtype):
    batch = make_batch([37, 0, 16, 3], [5, 0, 16, 3], 16, device, padding=2)
    rows = [randn(batch.nnz, 8, 128, dtype=dtype, device=device) for _ in range(2)]
    check_append(rows, batch, make_caches(layout, form, batch.num_pages, 16, 8, 128, device), (0.01, 0.37), layout)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slot_mapping(device, layout, form, slot_dtype):
    """Check slots before, in and after the cache, and more rows than slots."""
    slots = torch.randperm(5 * 16, device=device)[:30].to(slot_dtype)
    slots[3], slots[7], slots[9] = -1, 80, 2**31 - 1
    rows = [randn(33, 8, 128, dtype=BF16, device=device) for _ in range(2)]
    caches = make_caches(layout, form, 5, 16, 8, 128, device)
    check_mapped(rows, slots, caches, (0.01, 0.37), layout)
    if slot_dtype == torch.int64:
        slots[9] = 2**40
        check_mapped(rows, slots, caches, (0.01, 0.37), layout)


@pytest.mark.parametrize("heads, dim", [(1, 16), (3, 48), (2, 512), (1, 2064), (130, 32)])
@pytest.mark.parametrize("page_size", [1, 7])
def test_row_sizes(device, heads, dim, page_size):
    batch = make_batch([21, 6], [20, 3], page_size, device)
    rows = [randn(batch.nnz, heads, dim, dtype=BF16, device=device) for _ in range(2)]
    check_append(
        rows, batch, make_caches("NHD", "combined", batch.num_pages, page_size, heads, dim, device), (1.0, 3.0), "NHD"
    )


@pytest.mark.parametrize("pad", [1, 8])
def test_strides(device, pad):
    batch = make_batch([21, 6], [20, 3], 8, device)
    rows = [randn(batch.nnz, 4, 64 + pad, dtype=BF16, device=device)[..., pad:] for _ in range(2)]
    caches = make_caches("HND", "pair", batch.num_pages, 8, 4, 64, device, pad=pad)
    check_append(rows, batch, caches, (1.0, 3.0), "HND")


@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_ranges(device, magnitude, scale):
    """Check scales that round to zero, saturate at 448, or are subnormal, and zeros of both signs."""
    rows = [magnitude * torch.randn(7, 2, 64, device=device).to(FP16) for _ in range(2)]
    rows[0][:, 0, ::3] *= 0.0
    slots = torch.arange(7, device=device, dtype=torch.int32)
    check_mapped(rows, slots, make_caches("NHD", "combined", 1, 8, 2, 64, device), (scale, scale), "NHD")


def test_every_code_and_tie(device):
    """Check halves of representable numbers, so that ties occur, with a scale of exactly one."""
    x = torch.randint(-24, 25, (64, 2, 64), device=device).to(BF16) / 4
    x[..., ::16] = 6.0
    slots = torch.arange(64, device=device, dtype=torch.int32)
    check_mapped([x, -x], slots, make_caches("NHD", "combined", 4, 16, 2, 64, device), (1.0, 1.0), "NHD")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_in_tensors(device, shape):
    rows = [randn(7, 2, 64, dtype=BF16, device=device) for _ in range(2)]
    slots, caches = torch.arange(7, device=device), make_caches("NHD", "combined", 1, 8, 2, 64, device)
    scales = [torch.full(shape, value, device=device) for value in (0.2, 0.4)]
    check_mapped(rows, slots, caches, scales, "NHD")
    elsewhere = [scale.cpu() for scale in scales]
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*rows, slots, *caches, elsewhere[0], 0.4)


def test_no_rows(device):
    caches = make_caches("NHD", "combined", 2, 8, 2, 64, device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    rows = [torch.empty(0, 2, 64, dtype=BF16, device=device) for _ in range(2)]
    check_mapped(rows, none, caches, (1.0, 1.0), "NHD")
    rows = [torch.randn(3, 2, 64, device=device).to(BF16) for _ in range(2)]
    check_mapped(rows, none, caches, (1.0, 1.0), "NHD")


@settings(max_examples=40)
@given(data=st.data())
def test_any_batch_and_cache(device, data):
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3), label="lengths")
    page_size = data.draw(st.integers(1, 20), label="page_size")
    heads, dim = data.draw(st.integers(1, 3), label="heads"), 16 * data.draw(st.integers(1, 5), label="blocks")
    dtype = data.draw(st.sampled_from([BF16, FP16]), label="dtype")
    layout, form = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(FORMS))
    pad = data.draw(st.integers(0, 9), label="pad")
    scales = [data.draw(st.floats(2.0**-20, 2.0**10, width=32), label="scale") for _ in range(2)]
    batch = make_batch(lengths, lengths, page_size, device)
    rows = [randn(batch.nnz, heads, dim + pad, dtype=dtype, device=device)[..., :dim] for _ in range(2)]
    caches = make_caches(layout, form, batch.num_pages, page_size, heads, dim, device, pad=pad)
    check_append(rows, batch, caches, scales, layout)
