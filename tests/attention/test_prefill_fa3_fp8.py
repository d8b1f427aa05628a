# SPDX-License-Identifier: Apache-2.0
"""Prefill with backend "fa3" on an SM90 device: 8-bit keys and values, under 16-bit queries and under e4m3 ones."""

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


# e4m3 queries, keys and values: products of 8 bits.


def fp8_close(got, expected, kv_len: int) -> None:
    """Weights have three fraction bits (2^-5 of the output, as they are independent), sums of 32 keys 13 of them."""
    (o, lse), (want_o, want_lse) = got, expected
    assert not o.isnan().any()
    bound = 2**-5 + kv_len / 32 * 2**-13
    assert (o.float() - want_o).norm() <= bound * want_o.norm() + 1e-6
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def fp8_batch(qo_lens=QO_LENS, kv_lens=KV_LENS, **options) -> Batch:
    return batch_of(qo_lens, kv_lens, dtype=E4M3, **options)


def fp8_check(batch: Batch, page_size: int = 16, layout: str = "NHD", o_dtype=BF16, **options) -> None:
    expected, kv_len = batch.expected(Attention(**options)), max(batch.kv_lens)
    dtypes = {"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": o_dtype}
    plan = {"head_dim_vo": batch.head_dim_vo, **dtypes, **options}
    pages = batch.pages(page_size)
    wrapper = paged(batch, pages, layout, "fa3", **plan)
    assert wrapper._dtypes.compute == E4M3
    fp8_close(wrapper.run(batch.q, batch.cache(pages, layout), return_lse=True), expected, kv_len)
    wrapper = ragged(batch, layout, "fa3", **plan)
    fp8_close(wrapper.run(batch.q, *batch.dense(layout), return_lse=True), expected, kv_len)


@pytest.mark.parametrize("o_dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_e4m3_head_dims(heads, causal, o_dtype):
    fp8_check(fp8_batch(head_dim_qk=heads[0], head_dim_vo=heads[1]), o_dtype=o_dtype, causal=causal)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e4m3_pages(page_size, layout):
    fp8_check(fp8_batch(), page_size, layout, causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 8)], ids=str)
def test_e4m3_groups(heads):
    fp8_check(fp8_batch(num_qo_heads=heads[0], num_kv_heads=heads[1]), causal=True)


@pytest.mark.parametrize("options", [{"causal": True, "window_left": 100}, {"logits_soft_cap": 5.0}], ids=str)
def test_e4m3_options(options):
    fp8_check(fp8_batch(), **options)


@pytest.mark.parametrize("kv_len", [20000, 100000])
def test_e4m3_many_keys(kv_len):
    """The error of sums with few bits grows with the keys of an item; the bound is that of the whole row."""
    fp8_check(fp8_batch([3, 128], [kv_len, 7001], num_qo_heads=8, num_kv_heads=2), causal=True)


def test_e4m3_many_requests():
    """Check items of one step and of several, in all orders; results are reproducible."""
    qo_lens = [1 + (53 * i) % 400 for i in range(150)]
    kv_lens = [n + (97 * i) % 300 for i, n in enumerate(qo_lens)]
    batch = fp8_batch(qo_lens, kv_lens, num_qo_heads=8, num_kv_heads=2)
    wrapper = ragged(batch, backend="fa3", causal=True, q_data_type=E4M3)
    first = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    second = wrapper.run(batch.q, *batch.dense(), return_lse=True)
    fp8_close(first, batch.expected(Attention(causal=True)), max(kv_lens))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_e4m3_head_scales():
    """Scales of each head give what keys and queries that were multiplied by them give."""
    batch = fp8_batch()
    dense, lens = batch.dense(), max(batch.kv_lens)
    scales = [torch.rand(n, device="cuda") + 0.5 for n in (batch.num_qo_heads, batch.num_kv_heads, batch.num_kv_heads)]
    scaled = fp8_batch()
    scaled.q = batch.q.float() * scales[0][:, None]
    scaled.k, scaled.v = (x.float() * s[:, None] for x, s in zip((batch.k, batch.v), scales[1:], strict=True))
    expected = scaled.expected(Attention(causal=True))
    wrapper = ragged(batch, backend="fa3", causal=True, q_data_type=E4M3)
    fp8_close(wrapper.run(batch.q, *dense, *scales, return_lse=True), expected, lens)
    output, lse = batch.expected(Attention(causal=True, sm_scale=0.5 * 0.25 / 128**0.5))
    numbers = wrapper.run(batch.q, *dense, 0.5, 0.25, 3.0, return_lse=True)
    fp8_close(numbers, (3 * output, lse), lens)


@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_e4m3_single(backend):
    batch = fp8_batch([500], [900], num_qo_heads=8, num_kv_heads=2)
    got = single_prefill_with_kv_cache(batch.q, *batch.dense(), causal=True, backend=backend, return_lse=True)
    assert got[0].dtype == BF16
    fp8_close(got, batch.expected(Attention(causal=True)), 900)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_auto_takes_fa3(dtype):
    """Full tiles over an 8-bit cache run on the Hopper kernels."""
    batch = batch_of([512, 300], [700, 900], dtype=dtype)
    wrapper = ragged(batch, causal=True, q_data_type=dtype, kv_data_type=E4M3)
    assert wrapper._backend == "fa3"
