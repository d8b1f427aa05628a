# SPDX-License-Identifier: Apache-2.0
"""Prefill with the interface of TensorRT-LLM's fused attention: layouts, masks, statistics, and rejected arguments."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer import trtllm_fmha_v2_prefill
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import pattern
from .inputs import Batch, int32, offsets
from .prompts import F16, FP8, KV_LENS, PAGE, QO_LENS, SCALE, contiguous, prefill, workspace
from .reference import Attention


def close(out: torch.Tensor, expected, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(out.float(), expected[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"])
@pytest.mark.parametrize("mask_mode", ["causal", "PADDING"])
def test_layouts(device, layout, mask_mode):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    options: dict = {"mask_mode": mask_mode}
    qkv = contiguous(batch)
    if layout == "SEPARATE_Q_K_V":
        qkv = (batch.q, batch.k, batch.v)
    elif layout.startswith("Q_PAGED"):
        pages = batch.pages(PAGE)
        qkv = (batch.q, batch.cache(pages, layout[-3:], "combined"))
        options["block_tables"] = pages.block_tables()
    expected = batch.expected(Attention(causal=mask_mode == "causal", sm_scale=0.2, v_scale=2.0))
    close(prefill(batch, qkv, layout, 0.2, 2.0, **options), expected)
    out = torch.empty_like(batch.q)
    assert prefill(batch, qkv, layout, 0.2, 2.0, **options, out=out) is out
    close(out, expected)


def test_report(device, monkeypatch, capfd):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages = batch.pages(PAGE)
    qkv = (batch.q, batch.cache(pages, "NHD", "combined"))
    for words in ("", "1"):
        monkeypatch.setenv("FLASHINFER_FMHA_V2_VERBOSE", words)
        prefill(batch, qkv, "Q_PAGED_KV_NHD", block_tables=pages.block_tables())
        told = capfd.readouterr().err
        assert ("trtllm_fmha_v2_prefill: 4 requests, 61 queries" in told) == bool(words)
        assert (f"pages of {PAGE}" in told) == bool(words)


def test_packed_layout(device):
    batch = Batch(QO_LENS, QO_LENS, 2, 2, device=device)
    packed = torch.stack([batch.q, batch.k, batch.v], dim=1)
    close(prefill(batch, packed, "PACKED_QKV"), batch.expected(Attention(causal=True)))


@pytest.mark.parametrize("interleaved", [True, False])
def test_caches_of_one_allocation(device, interleaved):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages = batch.pages(PAGE)
    k, v = batch.cache(pages, "HND", "combined").unbind(1)
    pool = torch.stack([k, v], dim=1 if interleaved else 0)
    k, v = (pool[:, 0], pool[:, 1]) if interleaved else (pool[0], pool[1])
    tables = pages.block_tables()
    offset = torch.stack([2 * tables, 2 * tables + 1] if interleaved else [tables, tables + len(k)], dim=1)
    out = prefill(batch, (batch.q, (k, v)), "Q_PAGED_KV_HND", block_tables=offset)
    close(out, batch.expected(Attention(causal=True)))


def test_windows_caps_and_slopes(device):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    qkv = contiguous(batch)
    out = prefill(batch, qkv, "CONTIGUOUS_Q_KV", mask_mode="sliding_window", window_left=7)
    close(out, batch.expected(Attention(causal=True, window_left=7)))
    out = prefill(batch, qkv, "CONTIGUOUS_Q_KV", logits_soft_cap_scale=2.0)
    close(out, batch.expected(Attention(causal=True, logits_soft_cap=2.0)))
    out = prefill(batch, qkv, "CONTIGUOUS_Q_KV", pos_encoding_mode="alibi")
    close(out, batch.expected(Attention(causal=True, alibi=True)))


CHUNK = 16
CHUNKED = {"mask_mode": "chunked", "chunked_attention_size": CHUNK}


def chunk_mask(qo_len: int, kv_len: int, chunk: int) -> torch.Tensor:
    position = torch.arange(qo_len)[:, None] + kv_len - qo_len
    key = torch.arange(kv_len)
    return (key <= position) & (key >= position // chunk * chunk)


def chunks_of(batch: Batch, **settings) -> list[Attention]:
    lens = zip(batch.qo_lens, batch.kv_lens, strict=True)
    return [Attention(mask=chunk_mask(q, kv, CHUNK), **settings) for q, kv in lens]


def test_chunks_and_sinks(device):
    """Check chunks with a soft cap and statistics: the module of test_statistics with a cap."""
    batch = Batch(QO_LENS, KV_LENS, device=device)
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device)
    options = {**CHUNKED, "logits_soft_cap_scale": 2.0, "save_softmax_stats": True}
    out, _ = prefill(batch, contiguous(batch), "CONTIGUOUS_Q_KV", **options)
    close(out, batch.expected(chunks_of(batch, logits_soft_cap=2.0)))
    out, _ = prefill(batch, contiguous(batch), "CONTIGUOUS_Q_KV", **options, sinks=sinks)
    close(out, batch.expected(chunks_of(batch, logits_soft_cap=2.0, sinks=sinks)))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("in_tensor", [False, True], ids=["scale", "scale in a tensor"])
def test_statistics(device, cap, in_tensor):
    """Check statistics of causal attention, and of chunks with a soft cap."""
    batch = Batch(QO_LENS, KV_LENS, device=device)
    q_scale = 0.5
    scale = torch.tensor([SCALE * q_scale], device=device) if in_tensor else SCALE * q_scale
    options = {"save_softmax_stats": True, "logits_soft_cap_scale": cap, "sinks": torch.zeros(4, device=device)}
    options |= CHUNKED if cap else {}
    out, stats = prefill(batch, contiguous(batch), "CONTIGUOUS_Q_KV", scale, **options)
    settings = {"q_scale": q_scale, "sinks": torch.zeros(4)}
    capped = chunks_of(batch, logits_soft_cap=cap, **settings) if cap else None
    expected = batch.expected(capped or Attention(causal=True, **settings))
    close(out, expected)
    assert stats.shape == (*batch.q.shape[:2], 2)
    largest, total = stats.unbind(-1)
    lse = largest * (q_scale if cap is None else 8.0) + total.log()
    torch.testing.assert_close(lse, expected[1] * math.log(2), rtol=1e-3, atol=1e-3)
    if cap is not None:
        return
    rows = zip(QO_LENS, KV_LENS, batch.q.float().split(QO_LENS), batch.k.float().split(KV_LENS), strict=True)
    for qo_len, kv_len, q, k in rows:
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * SCALE
        hidden = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device).triu(kv_len - qo_len + 1)
        expected_largest = logits.masked_fill(hidden, -math.inf).amax(-1).clamp(min=0).T  # the sink logit is 0
        torch.testing.assert_close(largest[:qo_len], expected_largest, rtol=1e-3, atol=1e-3)
        largest = largest[qo_len:]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, F16, FP8], ids=str)
def test_fp8(device, out_dtype):
    batch = Batch(QO_LENS, KV_LENS, kv_dtype=FP8, device=device)
    batch.q = batch.q.to(FP8)
    expected = batch.expected(Attention(causal=True, v_scale=0.5))
    out = prefill(batch, contiguous(batch), "CONTIGUOUS_Q_KV", SCALE, 0.5, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    close(out, expected, 0.1 if out_dtype == FP8 else 4e-2)
    named = prefill(batch, contiguous(batch), "CONTIGUOUS_Q_KV", SCALE, 0.5, out_dtype=str(out_dtype).split(".")[1])
    assert named.dtype == out_dtype


BAD = [
    ({"input_layout": "QKV"}, "input_layout must be PACKED_QKV.*, got 'QKV'"),
    ({"input_layout": "PACKED_QKV"}, "qkv must be a tensor.*, got a tuple"),
    ({"input_layout": "SEPARATE_Q_K_V"}, "qkv must be a tuple of 3.*, got a tuple"),
    ({"input_layout": "Q_PAGED_KV_NHD"}, "block_tables must be a tensor.*, got None"),
    (
        {"input_layout": "Q_PAGED_KV_NHD", "block_tables": torch.zeros(4, 3)},
        "block_tables must be torch.int32, got torch.float32",
    ),
    (
        {"input_layout": "Q_PAGED_KV_NHD", "block_tables": int32([0], "cpu")[None]},
        "block_tables must have 4 rows.*, got 1",
    ),
    ({"mask_mode": "full"}, "mask_mode must be causal.*, got 'full'"),
    ({"mask_mode": "padding", "window_left": 3}, "must not be given with mask_mode 'padding'"),
    ({"mask_mode": "padding", "chunked_attention_size": 16}, "must not be given with mask_mode 'padding'"),
    ({"mask_mode": "chunked", "chunked_attention_size": 24}, "chunked_attention_size must be a power of two.*, got 24"),
    ({"batch_size": 3}, "must have 4, 4, 3 elements (batch_size), got 5, 5, 4"),
    ({"sinks": torch.zeros(3)}, "sinks must have 4 elements.*, got 3"),
    ({"pos_encoding_mode": "rope"}, "pos_encoding_mode must be 'alibi' or None.*, got 'rope'"),
    ({"cum_seq_lens_q": int32([0, 1, 2, 3, 500], "cpu")}, "cum_seq_lens_q must end at"),
    ({"cum_seq_lens_kv": int32([0, 100, 200, 300, 500], "cpu")}, "cum_seq_lens_kv must end at"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
def test_bad_arguments(device, change, text):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    arguments = {
        "qkv": contiguous(batch),
        "input_layout": "CONTIGUOUS_Q_KV",
        "workspace_buffer": workspace(device),
        "seq_lens": int32(KV_LENS, device),
        "max_q_len": 40,
        "max_kv_len": 97,
        "bmm1_scale": SCALE,
        "bmm2_scale": 1.0,
        "batch_size": 4,
        "cum_seq_lens_q": int32(offsets(QO_LENS), device),
        "cum_seq_lens_kv": int32(offsets(KV_LENS), device),
    }
    with pytest.raises(ValueError, match=pattern(text)):
        trtllm_fmha_v2_prefill(**(arguments | change))


def test_bad_ranks(device):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    q, kv = contiguous(batch)
    for qkv, layout, text in (
        ((q, kv[:, 0]), "CONTIGUOUS_Q_KV", "kv must have 4 dimensions.*, got 3"),
        ((q[0], kv), "CONTIGUOUS_Q_KV", "q must have 3 dimensions.*, got 2"),
        (kv[:, 0], "PACKED_QKV", "qkv must have 4 dimensions.*, got 3"),
        ((q.to(FP8), batch.k.to(FP8), batch.v.to(FP8)), "SEPARATE_Q_K_V", "SEPARATE_Q_K_V must have no FP8 inputs"),
        ((q[..., :32], kv[..., :32]), "CONTIGUOUS_Q_KV", "head_dim must be one of.*, got 32"),
    ):
        with pytest.raises(ArgumentError, match=text):
            prefill(batch, qkv, layout)
    with pytest.raises(ArgumentError, match="with save_softmax_stats, got SEPARATE_Q_K_V"):
        prefill(batch, (q, batch.k, batch.v), "SEPARATE_Q_K_V", save_softmax_stats=True)
