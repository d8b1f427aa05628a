# SPDX-License-Identifier: Apache-2.0
"""The attention reference against torch, closed forms and the text of the contract."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashinfer

from .inputs import FORMS, LAYOUTS, Batch, read
from .reference import Attention, alibi_slopes


def tensors(qo_len=5, kv_len=9, heads=4, kv_heads=2, dim=16):
    return torch.randn(qo_len, heads, dim), *torch.randn(2, kv_len, kv_heads, dim)


def torch_attention(q, k, v, **options):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)


def test_plain_causal_and_masked_attention_are_torchs():
    q, k, v = tensors()
    bottom_right = torch.ones(5, 9).tril(4).bool()
    some = torch.rand(5, 9) < 0.5
    some[:, 3] = True
    for what, mask in ((Attention(), None), (Attention(causal=True), bottom_right), (Attention(mask=some), some)):
        torch.testing.assert_close(what(q, k, v)[0], torch_attention(q, k, v, attn_mask=mask))
    torch.testing.assert_close(Attention(sm_scale=0.3)(q, k, v)[0], torch_attention(q, k, v, scale=0.3))
    scaled = Attention(sm_scale=0.3, q_scale=2, k_scale=0.25, v_scale=3)(q, k, v)[0]
    torch.testing.assert_close(scaled, 3 * torch_attention(q * 2, k * 0.25, v, scale=0.3))


def test_alibi_is_a_bias_and_the_cap_comes_after_it():
    q, k, v = tensors()
    bias = alibi_slopes(4).float()[:, None, None] * (torch.arange(9) - torch.arange(5)[:, None])
    torch.testing.assert_close(Attention(alibi=True)(q, k, v)[0], torch_attention(q, k, v, attn_mask=bias))
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4 + bias
    lse = torch.logsumexp(2 * torch.tanh(logits / 2), dim=-1).T / math.log(2)
    torch.testing.assert_close(Attention(alibi=True, logits_soft_cap=2)(q, k, v)[1], lse)


@pytest.mark.parametrize("heads", [1, 5, 8, 12, 71])
def test_alibi_slopes(heads):
    torch.testing.assert_close(alibi_slopes(heads).float(), flashinfer.utils.get_alibi_slopes(heads))


def test_rope_is_that_of_the_rope_family():
    q, k, v = tensors(kv_heads=4)
    positions = torch.arange(9, dtype=torch.int32)
    turned_q, _ = flashinfer.apply_rope_pos_ids(q, q, positions[4:], rope_scale=2.0, rope_theta=1e3)
    _, turned_k = flashinfer.apply_rope_pos_ids(k, k, positions, rope_scale=2.0, rope_theta=1e3)
    got = Attention(rope=True, rope_scale=2.0, rope_theta=1e3, causal=True)(q, k, v)
    torch.testing.assert_close(got, Attention(causal=True)(turned_q, turned_k, v), rtol=1e-4, atol=1e-4)


def test_window_counts_the_diagonal():
    seen = Attention(causal=True, window_left=2).visible(3, 6, torch.device("cpu"))
    assert seen.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    seen = Attention(window_left=0).visible(2, 3, torch.device("cpu"))
    assert seen.int().tolist() == [[0, 1, 1], [0, 0, 1]]
    seen = Attention(window_left=1, mask=torch.tensor([[1, 1, 0], [1, 0, 1]])).visible(2, 3, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 1, 0], [0, 0, 1]]


def test_rows_without_keys():
    q, k, v = tensors(qo_len=5, kv_len=3)
    o, lse = Attention(causal=True)(q, k, v)
    assert (o[:2] == 0).all() and (lse[:2] == -math.inf).all() and lse[2:].isfinite().all()
    o, lse = Attention()(q, k[:0], v[:0])
    assert o.shape == (5, 4, 16) and (o == 0).all() and (lse == -math.inf).all()
    assert not Attention(causal=True)(q[:0], k, v)[0].numel()


def test_sinks_are_keys_without_a_value():
    q, k, v = tensors()
    sinks = torch.randn(4)
    o, lse = Attention()(q, k, v)
    with_sinks, score = Attention(sinks=sinks)(q, k, v)
    torch.testing.assert_close(score.exp2(), lse.exp2() + sinks.exp())
    torch.testing.assert_close(with_sinks, o * (lse.exp2() / score.exp2())[..., None])


def test_items_see_the_prefix_and_themselves():
    # Two keys of prefix, delimiter, item of two tokens, delimiter, item of one token.
    what = Attention(prefix_len=2, token_pos=torch.tensor([0, 1, 2, 0, 1, 0]))
    assert what.visible(7, 7, torch.device("cpu")).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_pages_hold_the_keys_and_nothing_else(form, layout):
    batch = Batch([1, 2, 1], [7, 0, 12], dtype=torch.bfloat16)
    pages = batch.pages(page_size=5)
    cache = batch.cache(pages, layout, form)
    k, v = cache if isinstance(cache, tuple) else cache.unbind(1)
    assert (k.stride() == v.stride()) == (form != "separate")
    for rows, half in ((batch.k, k), (batch.v, v)):
        half = half.transpose(1, 2) if layout == "HND" else half
        flat = half.reshape(-1, *half.shape[2:])
        assert torch.equal(torch.cat([flat[pages.slots(i)] for i in range(3)]), rows)
        assert flat.isfinite().sum() == rows.numel()
    assert pages.last_page_len.tolist() == [2, 0, 2] and pages.indptr.tolist() == [0, 2, 2, 5]
    assert flashinfer.get_seq_lens(pages.indptr, pages.last_page_len, 5).tolist() == [7, 0, 12]


def test_nvfp4_reads_low_nibbles_first():
    rows, factors = torch.tensor([[[0x21, 0xF7, 0, 0, 0, 0, 0, 0x80]]], dtype=torch.uint8), torch.full((1, 1, 1), 2.0)
    assert read(rows, factors.to(torch.float8_e4m3fn))[0, 0].tolist() == [1, 2, 12, -12, *[0] * 12]
