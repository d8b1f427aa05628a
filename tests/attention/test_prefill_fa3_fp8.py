# SPDX-License-Identifier: Apache-2.0
"""Prefill with backend "fa3" and 8-bit keys and values on an SM90 device."""

from __future__ import annotations

import pytest
import torch

from flashinfer import single_prefill_with_kv_cache

from ..hopper.devices import needs_hopper
from .fa3 import BF16, F16, KV_LENS, QO_LENS, TOLERANCE
from .inputs import LAYOUTS, Batch
from .reference import Attention
from .wrappers import close, paged, ragged

pytestmark = needs_hopper

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def batch_of(qo_lens=QO_LENS, kv_lens=KV_LENS, head_dim_qk=128, dtype=BF16, kv_dtype=E4M3, **options) -> Batch:
    return Batch(qo_lens, kv_lens, head_dim_qk=head_dim_qk, dtype=dtype, kv_dtype=kv_dtype, device="cuda", **options)


def check(batch: Batch, page_size: int = 16, layout: str = "NHD", **options) -> None:
    """Compare paged and ragged wrappers with the reference."""
    expected, tolerance = batch.expected(Attention(**options)), TOLERANCE[batch.dtype]
    plan = {"head_dim_vo": batch.head_dim_vo, "q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype, **options}
    pages = batch.pages(page_size)
    wrapper = paged(batch, pages, layout, "fa3", **plan)
    close(wrapper.run(batch.q, batch.cache(pages, layout), return_lse=True), expected, tolerance)
    wrapper = ragged(batch, layout, "fa3", **plan)
    close(wrapper.run(batch.q, *batch.dense(layout), return_lse=True), expected, tolerance)


@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, E4M3), (BF16, E5M2), (F16, E4M3), (F16, E5M2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(heads, causal, dtype, kv_dtype):
    check(batch_of(head_dim_qk=heads[0], head_dim_vo=heads[1], dtype=dtype, kv_dtype=kv_dtype), causal=causal)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(page_size, layout):
    check(batch_of(), page_size, layout, causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 8)], ids=str)
def test_groups(heads):
    check(batch_of(num_qo_heads=heads[0], num_kv_heads=heads[1]), causal=True)


@pytest.mark.parametrize("options", [{"causal": True, "window_left": 100}, {"logits_soft_cap": 5.0}], ids=str)
def test_options(options):
    check(batch_of(), **options)


def test_few_queries_over_many_keys():
    check(batch_of([3, 128], [20000, 7001], num_qo_heads=8, num_kv_heads=2), causal=True)


def test_many_requests():
    """Check items of one step and of several, in all orders; results are reproducible."""
    qo_lens = [1 + (53 * i) % 400 for i in range(150)]
    kv_lens = [n + (97 * i) % 300 for i, n in enumerate(qo_lens)]
    batch = batch_of(qo_lens, kv_lens, num_qo_heads=8, num_kv_heads=2)
    wrapper = ragged(batch, backend="fa3", causal=True, q_data_type=BF16, kv_data_type=E4M3)
    first = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    second = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    close(first, batch.expected(Attention(causal=True)), TOLERANCE[BF16])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_scales():
    """Scales of keys multiply the logits, those of values the output."""
    batch = batch_of()
    k_scale, v_scale = 0.5, 3.0
    output, lse = batch.expected(Attention(causal=True, sm_scale=k_scale / 128**0.5))
    pages = batch.pages(16)
    wrapper = paged(batch, pages, backend="fa3", causal=True, q_data_type=BF16, kv_data_type=E4M3)
    got = wrapper.run(batch.q, batch.cache(pages), k_scale=k_scale, v_scale=v_scale, return_lse=True)
    close(got, (output * v_scale, lse), TOLERANCE[BF16])


def test_many_requests_without_keys():
    """Blocks that still convert the tiles of an item are handed several items without keys."""
    check(batch_of([300] * 4 + [200] * 60, [700] * 4 + [0] * 60, num_qo_heads=32, num_kv_heads=8))


def test_single():
    batch = batch_of([500], [900], num_qo_heads=8, num_kv_heads=2)
    got = single_prefill_with_kv_cache(batch.q, *batch.dense(), causal=True, backend="fa3", return_lse=True)
    close(got, batch.expected(Attention(causal=True)), TOLERANCE[BF16])
