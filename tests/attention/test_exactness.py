# SPDX-License-Identifier: Apache-2.0
"""Bit-exact properties: repeated runs, a request in any batch, rows that see one key or none."""

from __future__ import annotations

import math

import pytest
import torch

from . import calls
from .inputs import Batch, offsets
from .reference import Attention

BATCHED = [calls.batch_decode, calls.tensor_core_decode, calls.paged_prefill, calls.ragged_prefill]


def name_of(call):
    return call.__name__


def make_batch(device, qo_lens, kv_lens, heads=(4, 2), **options):
    return Batch(qo_lens, kv_lens, *heads, device=device, **options)


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("call", BATCHED, ids=name_of)
def test_repeated_runs_agree_to_the_bit(device, call):
    decode = call in BATCHED[:2]
    batch = make_batch(device, [1] * 4 if decode else [1, 70, 3, 17], [2500, 3, 700, 64])
    what = Attention(causal=not decode)
    once, again = (call(batch, what, page_size=16) for _ in range(2))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("call", BATCHED[:2], ids=name_of)
def test_whoever_takes_what_is_left_the_result_is_the_same(device, call):
    """Check 5 and 7 KV heads, which do not divide the number of blocks: any idle block may take the remaining work."""
    for kv_heads in (5, 7):
        batch = make_batch(device, [1] * 9, [3000, 1, 2500, 64, 0, 1999, 4000, 130, 700], (2 * kv_heads, kv_heads))
        once, *others = (call(batch, Attention(), page_size=16) for _ in range(4))
        calls.check(once, batch.expected(), torch.float16)
        for again in others:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 16}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("call", BATCHED[1:], ids=name_of)
def test_a_request_does_not_depend_on_its_batch(device, call, split):
    decode = call is calls.tensor_core_decode
    qo_lens, kv_lens = ([1] * 5 if decode else [1, 70, 3, 17, 1]), [2500, 333, 700, 64, 1]
    batch = make_batch(device, qo_lens, kv_lens)
    what = Attention(causal=not decode)
    o, lse = call(batch, what, page_size=16, plan=split)
    calls.check((o, lse), batch.expected(what), batch.dtype)
    for request, (a, b) in enumerate(zip(offsets(qo_lens), offsets(qo_lens)[1:], strict=False)):
        alone = call(batch.part(request, request + 1), what, page_size=16, plan=split)
        assert torch.equal(bits(alone[0]), bits(o[a:b])) and torch.equal(bits(alone[1]), bits(lse[a:b]))


@pytest.mark.parametrize("call", [calls.single_prefill, calls.paged_prefill, calls.ragged_prefill], ids=name_of)
@pytest.mark.parametrize("kv_len", [0, 1, 5, 64])
def test_more_queries_than_keys(device, call, kv_len):
    batch = make_batch(device, [70], [kv_len])
    what = Attention(causal=True)
    o, lse = call(batch, what)
    calls.check((o, lse), batch.expected(what), batch.dtype)
    assert (o[: 70 - kv_len] == 0).all() and (lse[: 70 - kv_len] == -math.inf).all()


@pytest.mark.parametrize("call", [calls.paged_prefill, calls.ragged_prefill], ids=name_of)
def test_empty_requests(device, call):
    batch = make_batch(device, [0, 3, 2, 0, 40, 0], [7, 0, 9, 0, 0, 130])
    o, lse = call(batch, Attention())
    calls.check((o, lse), batch.expected(), batch.dtype)
    assert (o[:3] == 0).all() and (o[5:] == 0).all()


@pytest.mark.parametrize("call", BATCHED[:2], ids=name_of)
def test_decoding_without_keys(device, call):
    batch = make_batch(device, [1] * 5, [0, 40, 0, 0, 3])
    calls.check(call(batch, Attention()), batch.expected(), batch.dtype)
    batch = make_batch(device, [1] * 3, [0, 0, 0])
    o, lse = call(batch, Attention())
    assert (o == 0).all() and (lse == -math.inf).all()


def far_apart(device, qo_len, kv_len, visible):
    """Return inputs with logits of magnitude 640 thousand, negative for the visible key of each row."""
    batch = make_batch(device, [qo_len], [kv_len])
    batch.q.fill_(100), batch.k.fill_(100)
    batch.k[visible] = -100
    return batch


@pytest.mark.parametrize("call", [calls.single_prefill, calls.paged_prefill, calls.ragged_prefill], ids=name_of)
@pytest.mark.parametrize("visible", [0, 37, 129])
def test_one_visible_key_far_below_hidden_ones(device, call, visible):
    batch = far_apart(device, 3, 130, visible)
    mask = torch.zeros(3, 130, dtype=torch.bool, device=device)
    mask[:2, visible] = True
    o, lse = call(batch, Attention(mask=mask, sm_scale=1.0))
    assert torch.equal(o[:2], batch.v[visible].repeat_interleave(2, dim=0).expand(2, -1, -1))
    assert (lse[:2] < -9e5).all() and lse[:2].isfinite().all()
    assert (o[2] == 0).all() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("call", BATCHED, ids=name_of)
def test_a_window_of_one_key_far_below_hidden_ones(device, call):
    batch = far_apart(device, 1, 130, 129)
    o, lse = call(batch, Attention(window_left=0, sm_scale=1.0))
    assert torch.equal(o[0], batch.v[129].repeat_interleave(2, dim=0)) and lse.isfinite().all()


def test_single_decode_of_one_key_far_below_zero(device):
    batch = far_apart(device, 1, 1, 0)
    o, lse = calls.single_decode(batch, Attention(sm_scale=1.0))
    assert torch.equal(o[0], batch.v[0].repeat_interleave(2, dim=0)) and lse.isfinite().all()


def test_large_logits_of_both_signs(device):
    batch = make_batch(device, [5], [300], amplitude=3000.0)
    what = Attention(causal=True)
    calls.check(calls.paged_prefill(batch, what), batch.expected(what), batch.dtype, factor=4)  # sums near 1e4


@pytest.mark.parametrize("call", [calls.paged_prefill, calls.ragged_prefill], ids=name_of)
@pytest.mark.parametrize("step", [0.01, 0.3, 20.0])
def test_logits_that_grow_from_key_to_key(device, call, step):
    """Check logits that grow with each key: kernels may use an older maximum only while the weights stay finite."""
    batch = make_batch(device, [70], [500])
    batch.q.zero_(), batch.k.zero_()
    batch.q[..., 0] = 1
    batch.k[..., 0] = (torch.arange(500, device=device) * step)[:, None].to(batch.dtype)
    what = Attention(causal=True, sm_scale=1.0)
    calls.check(call(batch, what), batch.expected(what), batch.dtype)
