# SPDX-License-Identifier: Apache-2.0
"""Prefill with backend "fa3" on an SM90 device. test_emulated_prefill.py runs its kernels without one."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache

from ..graphs import capture
from ..hopper.devices import needs_hopper
from .fa3 import BF16, F16, KV_LENS, QO_LENS, TOLERANCE
from .inputs import FORMS, LAYOUTS, Batch
from .reference import Attention
from .wrappers import close, paged, ragged, workspace

pytestmark = needs_hopper


def batch_of(qo_lens=QO_LENS, kv_lens=KV_LENS, head_dim_qk=128, dtype=BF16, **options) -> Batch:
    return Batch(qo_lens, kv_lens, head_dim_qk=head_dim_qk, dtype=dtype, device="cuda", **options)


def check(batch: Batch, page_size: int = 16, form: str = "pair", layout: str = "NHD", **options) -> None:
    """Compare paged and ragged wrappers with the reference."""
    expected, tolerance = batch.expected(Attention(**options)), TOLERANCE[batch.dtype]
    pages = batch.pages(page_size)
    wrapper = paged(batch, pages, layout, "fa3", head_dim_vo=batch.head_dim_vo, q_data_type=batch.dtype, **options)
    close(wrapper.run(batch.q, batch.cache(pages, layout, form), return_lse=True), expected, tolerance)
    wrapper = ragged(batch, layout, "fa3", head_dim_vo=batch.head_dim_vo, q_data_type=batch.dtype, **options)
    close(wrapper.run(batch.q, *batch.dense(layout), return_lse=True), expected, tolerance)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(heads, causal, dtype):
    check(batch_of(head_dim_qk=heads[0], head_dim_vo=heads[1], dtype=dtype), causal=causal)


@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_pages(page_size, layout, form):
    check(batch_of(), page_size, form, layout, causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (7, 1), (32, 8), (5, 5), (40, 8)], ids=str)
def test_groups(heads):
    check(batch_of(num_qo_heads=heads[0], num_kv_heads=heads[1]), causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window_left": 100},
        {"window_left": 0},
        {"causal": True, "logits_soft_cap": 5.0},
        {"causal": True, "sm_scale": 0.3},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_options(options, head_dim):
    check(batch_of(head_dim_qk=head_dim), **options)


def test_custom_mask():
    batch = batch_of([40, 130, 7], [70, 200, 333])
    masks = [torch.rand(q, k, device="cuda") < 0.6 for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    expected = batch.expected([Attention(mask=mask) for mask in masks])
    pages, flat = batch.pages(16), torch.cat([mask.flatten() for mask in masks])
    wrapper = paged(batch, pages, backend="fa3", custom_mask=flat, q_data_type=BF16)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), expected, TOLERANCE[BF16])


def test_few_queries_over_many_keys():
    """Check keys that are split among blocks, with partial states that are merged."""
    check(batch_of([3, 128], [20000, 7001], num_qo_heads=8, num_kv_heads=2), causal=True)


def test_many_requests():
    """Check several items per block, of lengths that are no multiple of anything; results are reproducible."""
    qo_lens = [1 + (53 * i) % 400 for i in range(150)]
    kv_lens = [n + (97 * i) % 300 for i, n in enumerate(qo_lens)]
    batch = batch_of(qo_lens, kv_lens, num_qo_heads=8, num_kv_heads=2)
    wrapper = ragged(batch, backend="fa3", causal=True, q_data_type=BF16)
    first = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    second = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    close(first, batch.expected(Attention(causal=True)), TOLERANCE[BF16])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_replan_with_more_rows():
    """Check that tensor maps follow a plan with more queries than the plan before it."""
    small, large = batch_of([5], [50]), batch_of([200, 70], [300, 90])
    wrapper = ragged(small, backend="fa3", causal=True, q_data_type=BF16)
    wrapper.run(small.q, *small.dense())
    for batch in (large, small, large):
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 128, causal=True, q_data_type=BF16)
        for _ in range(2):
            got = wrapper.run(batch.q, *batch.dense(), return_lse=True)
            close(got, batch.expected(Attention(causal=True)), TOLERANCE[BF16])


def test_cuda_graph():
    """Replays follow a new plan: items are taken from a counter that every launch leaves at 0."""
    empty = [torch.empty(len(QO_LENS) + 1, dtype=torch.int32, device="cuda") for _ in range(2)]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(
        workspace("cuda"), use_cuda_graph=True, qo_indptr_buf=empty[0], kv_indptr_buf=empty[1], backend="fa3"
    )
    graph = None
    for qo_lens in (QO_LENS, QO_LENS[::-1]):
        batch = batch_of(qo_lens, [n + 60 for n in qo_lens])
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, batch.head_dim_qk, causal=True, q_data_type=BF16)
        if graph is None:
            q, k, v = (x.clone() for x in (batch.q, *batch.dense()))
            graph, (out, lse) = capture(lambda: wrapper.run(q, k, v, return_lse=True))  # noqa: B023
        for to, new in zip((q, k, v), (batch.q, *batch.dense()), strict=True):
            to.copy_(new)
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            close((out, lse), batch.expected(Attention(causal=True)), TOLERANCE[BF16])


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_many_items(kv_heads):
    """More items than blocks: blocks take them from the counter, head by head."""
    batch = batch_of([1100, 700, 1, 900], [1100, 2000, 50, 901], num_qo_heads=4 * kv_heads, num_kv_heads=kv_heads)
    for _ in range(3):
        check(batch, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_single(causal):
    batch = batch_of([500], [900], num_qo_heads=8, num_kv_heads=2)
    k, v = batch.dense()
    got = single_prefill_with_kv_cache(batch.q, k, v, causal=causal, backend="fa3", return_lse=True)
    close(got, batch.expected(Attention(causal=causal)), TOLERANCE[BF16])
