# SPDX-License-Identifier: Apache-2.0
"""Decoding over page tables through the calls with names of other libraries: xqa and trtllm."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

from ..bad_arguments import pattern
from .inputs import LAYOUTS, Batch
from .reference import Attention
from .tables import KV_LENS, PAGE, SCALE, Tables, close

F16, FP8 = torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window_left", [-1, 6])
def test_decode(device, layout, window_left):
    call = Tables(device, layout)
    expected = call.batch.expected(Attention(window_left=window_left, sm_scale=0.2, v_scale=2.0))
    options = {"bmm1_scale": 0.2, "bmm2_scale": 2.0, "window_left": window_left, "kv_layout": layout}
    for decode in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        out = decode(*call.decode, **options)
        assert out.shape == call.batch.q.shape
        close(out, expected)
    pair = (call.batch.q, tuple(call.cache.unbind(1)), *call.decode[2:])
    target = torch.empty_like(call.batch.q)
    assert trtllm_batch_decode_with_kv_cache(*pair, **options, out=target) is target
    close(target, expected)
    assert not call.workspace[: 8 << 20].any()


@pytest.mark.parametrize("padding", [-1, 1 << 24])
def test_padding_of_tables(device, padding):
    """Check that table entries behind the pages of a request are not read."""
    call = Tables(device)
    for i, n in enumerate(KV_LENS):
        call.tables[i, -(-n // PAGE) :] = padding
    expected = call.batch.expected()
    close(xqa_batch_decode_with_kv_cache(*call.decode, bmm1_scale=SCALE), expected)
    output = torch.empty_like(call.batch.q)
    call.xqa(output.unsqueeze(1))
    close(output, expected)


@pytest.mark.parametrize("q_len", [1, 2])
def test_tables_that_a_cpu_refuses(q_len):
    call = Tables("cpu", q_len=q_len, kv_lens=[20, 40])
    query, cache, scratch, tables, lens, _ = call.decode

    def decode(tables, lens, max_seq_len=48):
        options = {"bmm1_scale": SCALE, "q_len_per_req": q_len}
        return xqa_batch_decode_with_kv_cache(query, cache, scratch, tables, lens, max_seq_len, **options)

    bad = tables.clone()
    bad[1, 2] = 1 << 24
    with pytest.raises(ArgumentError, match=rf"kv_indices\[5\] must be 0 to {len(cache) - 1}.*, got {1 << 24}"):
        decode(bad, lens)
    for first, second, wrong, max_seq_len, limit in (
        (49, 20, 49, 99, 48),
        (20, 49, 49, 99, 48),
        (-1, 20, -1, 48, 48),
        (20, 40, 40, 30, 30),
    ):
        with pytest.raises(ArgumentError, match=rf"seq_lens must be 0 to {limit} .*, got {wrong}"):
            decode(tables, torch.tensor([first, second]), max_seq_len)
    close(decode(tables, lens), call.batch.expected(Attention(causal=True, sm_scale=SCALE)))


def test_tables_and_lengths_with_strides(device):
    call = Tables(device)
    query, cache, scratch, tables, lens, longest = call.decode
    tables, lens = (torch.stack([x, x + 1000], dim=-1)[..., 0] for x in (tables, lens))
    close(xqa_batch_decode_with_kv_cache(query, cache, scratch, tables, lens, longest, SCALE), call.batch.expected())


def test_layout_of_trtllm_is_heads_first(device):
    call = Tables(device, "HND")
    close(trtllm_batch_decode_with_kv_cache(*call.decode, bmm1_scale=SCALE), call.batch.expected())


def test_one_tensor_for_keys_and_values(device):
    call = Tables(device)
    call.batch.v = call.batch.k
    shared = (call.batch.q, call.cache[:, :1], *call.decode[2:])
    close(xqa_batch_decode_with_kv_cache(*shared, bmm1_scale=SCALE), call.batch.expected())


def test_scales_in_tensors(device):
    call = Tables(device)
    scales = {name: torch.tensor(x, device=device) for name, x in (("bmm1_scale", 0.25), ("bmm2_scale", 2.0))}
    expected = call.batch.expected(Attention(sm_scale=0.25, v_scale=2.0))
    close(xqa_batch_decode_with_kv_cache(*call.decode, **scales), expected, 4e-3)


@pytest.mark.parametrize("decode", [xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache])
def test_the_scale_of_the_output_is_in_bmm2_scale_already(device, decode):
    """Check that ``o_scale`` changes nothing: callers pass ``v_scale / o_scale`` as ``bmm2_scale``."""
    call = Tables(device)
    expected = call.batch.expected(Attention(sm_scale=SCALE, v_scale=0.5 / 0.25))
    out = decode(*call.decode, SCALE, 0.5 / 0.25, kv_layout="NHD", o_scale=0.25)
    close(out, expected)
    rows = torch.arange(len(KV_LENS) + 1, dtype=torch.int32, device=device)
    if decode is xqa_batch_decode_with_kv_cache:
        mask = torch.full((len(KV_LENS), 2), 1, dtype=torch.int32, device=device).to(torch.uint16)
        options = {"q_len_per_req": 2, "mask": mask, "q_cu_seq_lens": rows, "o_scale": 0.25}
        close(decode(*call.decode, SCALE, 0.5 / 0.25, **options), expected)


def test_scales_in_host_memory_have_their_full_range(device):
    call = Tables(device)
    expected = call.batch.expected()
    out = torch.empty_like(call.batch.q.unsqueeze(1))
    call.xqa(out, q_scale=torch.tensor(1e-8), kv_scale=torch.tensor([1e8]), rcp_out_scale=1e-8)
    close(out, expected)


def test_lengths_change_and_the_plan_stays(device):
    """Check that one plan serves calls that differ only in device memory, as replays of a graph do."""
    from flashinfer.attention import uniform_plan

    call = Tables(device, kv_lens=[120, 130])
    out = torch.empty_like(call.batch.q)
    query, cache, scratch, tables, lens, max_seq_len = call.decode
    lens, tables = lens.clone(), tables.clone()

    def step() -> None:
        xqa_batch_decode_with_kv_cache(query, cache, scratch, tables, lens, max_seq_len, SCALE, out=out)

    def plans() -> int:
        return len(uniform_plan._plans) + len(uniform_plan._captured)

    step()
    before = plans()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for kv_lens in ([5, 130], [0, 1], [120, 64]):
        lens.copy_(torch.tensor(kv_lens))
        graph.replay() if device == "cuda" else step()
        for i, n in enumerate(kv_lens):
            k, v = (x[call.batch.kv_indptr_host[i] :][:n] for x in (call.batch.k, call.batch.v))
            close(out[i], [Attention()(query[i : i + 1], k, v)[0][0]])
    assert plans() == before
    xqa_batch_decode_with_kv_cache(query, cache, scratch, tables, lens, max_seq_len + 1, SCALE)
    is_taken = device == "cuda"  # the graph owns the plan: it may be replayed on another stream
    assert plans() == before + is_taken  # a request that grows by a token reuses the plan


def test_sinks(device):
    call = Tables(device)
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device)
    expected = call.batch.expected(Attention(sinks=sinks))
    close(xqa_batch_decode_with_kv_cache(*call.decode, bmm1_scale=SCALE, sinks=sinks), expected)
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    call.xqa(out, sinks=sinks.view(2, 2))
    close(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_xqa(device, layout):
    call = Tables(device, layout)
    for window in (0, 7):
        out = torch.empty_like(call.batch.q).unsqueeze(1)
        call.xqa(out, layout, q_scale=0.5, kv_scale=2.0, sliding_win_size=window, rcp_out_scale=0.25)
        close(out, call.batch.expected(Attention(window_left=window - 1, v_scale=0.5)))
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    call.xqa(out, layout, kv_scale=torch.tensor(2.0, device=device))
    close(out, call.batch.expected(Attention(k_scale=2.0, v_scale=2.0)), 4e-3)


def test_fp8_cache_and_output(device):
    call = Tables(device, kv_dtype=FP8)
    expected = call.batch.expected(Attention(k_scale=0.5, v_scale=0.5))
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    call.xqa(out, kv_scale=0.5)
    close(out, expected, 1e-2)
    out8 = torch.empty_like(out, dtype=FP8)
    call.xqa(out8, kv_scale=0.5, rcp_out_scale=2.0)
    close(out8, [2 * expected[0]], 0.15)
    decode = (call.batch.q, call.cache.transpose(2, 3), *call.decode[2:])
    out8 = trtllm_batch_decode_with_kv_cache(*decode, bmm1_scale=SCALE / 2, bmm2_scale=1e4, out_dtype=FP8)
    assert out8.dtype == FP8 and not out8.float().isnan().any() and out8.float().abs().max() == 448  # saturated


# Draft tokens ------------------------------------------------------------------------------------


def packed(visible: torch.Tensor) -> torch.Tensor:
    """Pack ``[..., tokens]`` bits into uint16, padded to a multiple of two words."""
    tokens = visible.shape[-1]
    words = 2 * math.ceil(tokens / 32)
    bits = torch.nn.functional.pad(visible.int(), (0, 16 * words - tokens)).unflatten(-1, (words, 16))
    numbers = (bits << torch.arange(16, device=visible.device)).sum(-1)
    return numbers.to(torch.int32).to(torch.uint16)


@pytest.mark.parametrize("q_len", [2, 5, 33])
def test_causal_drafts(device, q_len):
    call = Tables(device, q_len=q_len, kv_lens=[40, 54, 130])
    expected = call.batch.expected(Attention(causal=True, window_left=20))
    options = {"bmm1_scale": SCALE, "q_len_per_req": q_len, "window_left": 20}
    close(xqa_batch_decode_with_kv_cache(*call.decode, **options), expected)
    causal = torch.ones(q_len, q_len, device=device).tril().bool().expand(3, -1, -1)
    close(xqa_batch_decode_with_kv_cache(*call.decode, **options, mask=packed(causal)), expected)


@pytest.mark.parametrize("use_sinks", [False, True])
def test_trees_of_drafts(device, use_sinks):
    q_len, kv_lens = 5, [40, 54, 130, 5]
    call = Tables(device, q_len=q_len, kv_lens=kv_lens)
    visible = torch.rand(4, q_len, q_len, device=device) < 0.5
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device) if use_sinks else None
    before = [torch.ones(q_len, n - q_len, dtype=torch.bool) for n in kv_lens]
    masks = [torch.cat([x, y.cpu()], 1) for x, y in zip(before, visible, strict=True)]
    expected = call.batch.expected([Attention(mask=mask, sinks=sinks) for mask in masks])
    options = {"sinks": sinks, "mask": packed(visible)}
    close(xqa_batch_decode_with_kv_cache(*call.decode, bmm1_scale=SCALE, q_len_per_req=q_len, **options), expected)
    q = call.batch.q.view(4, 1, q_len, 4, 64)
    out = torch.empty_like(q)
    call.xqa(out, q=q, q_seq_len=q_len, **options)
    close(out, expected)


def test_different_numbers_of_drafts(device):
    counts, kv_lens = [3, 0, 1, 3], [40, 9, 130, 5]
    call = Tables(device, kv_lens=kv_lens)
    batch = Batch(counts, kv_lens, device=device)
    batch.k, batch.v = call.batch.k, call.batch.v
    visible = torch.ones(3, 3, device=device).tril().bool()
    mask = packed(torch.cat([visible[:n] for n in counts]))
    out = torch.empty_like(batch.q)
    call.xqa(out, q=batch.q, q_seq_len=3, mask=mask, q_cu_seq_lens=batch.qo_indptr)
    expected = batch.expected(Attention(causal=True))
    close(out, expected)
    decode = (batch.q, *call.decode[1:])
    options = {"bmm1_scale": SCALE, "q_len_per_req": 3, "mask": mask, "q_cu_seq_lens": batch.qo_indptr}
    close(xqa_batch_decode_with_kv_cache(*decode, **options), expected)


# Rejected arguments ------------------------------------------------------------------------------

BAD_TRTLLM = [
    ({"backend": "fa2"}, KeyError, "backend must be 'auto' or 'xqa'.*, got 'fa2'"),
    ({"backend": "trtllm-gen"}, ValueError, "which needs SM100"),
    ({"o_sf_scale": 1.0}, ValueError, "o_sf_scale must be None"),
    ({"max_q_len": 3}, ValueError, "max_q_len must be None"),
    ({"uses_shared_paged_kv_idx": False}, ValueError, "uses_shared_paged_kv_idx must be True"),
    ({"enable_block_sparse_attention": True}, ValueError, "enable_block_sparse_attention must be False"),
    ({"cp_world": 2}, ValueError, "cp_world and cp_rank need causal_seqlens_kv_global"),
    ({"request_order": 1}, ValueError, "request_order requires the explicit backend='cake'"),
    ({"bf16q_fp8kv_transform_mode": "x"}, ValueError, "bf16q_fp8kv_transform_mode must be None"),
    ({"return_lse": True}, NotImplementedError, "return_lse must be False and lse None"),
    ({"out_dtype": "nvfp4"}, ValueError, "NVFP4 outputs need SM100"),
    ({"q_len_per_req": 0}, ValueError, "q_len_per_req must be at least 1, got 0"),
    ({"q_len_per_req": 2}, ValueError, "q must have 8 rows.*, got 4"),
    ({"kv_layout": "HDN"}, KeyError, "kv_layout must be one of NHD, HND, got 'HDN'"),
    ({"sinks": torch.ones(3)}, ValueError, "sinks must have 4 elements.*, got 3"),
    ({"out": torch.ones(5, 4, 64)}, ValueError, "out must have shape (4, 4, 64).*, got (5, 4, 64)"),
]


@pytest.mark.parametrize("change, error, text", BAD_TRTLLM, ids=[text for *_, text in BAD_TRTLLM])
def test_bad_trtllm(device, change, error, text):
    with pytest.raises(error, match=pattern(text)):
        trtllm_batch_decode_with_kv_cache(*Tables(device, "HND").decode, **change)


def test_sizes_of_xqa_are_those_of_its_tensors(device):
    call = Tables(device)
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    k, v = call.cache.unbind(1)
    tables = (call.tables, call.pages.lens, out, call.workspace, call.workspace)
    for heads, page_size in ((2, 2 * PAGE), (1, PAGE)):
        with pytest.raises(ArgumentError, match=f"must have NHD pages of {page_size} tokens by {heads} heads"):
            flashinfer.xqa(call.batch.q.unsqueeze(1), k, v, *tables, heads, page_size)


def test_bad_drafts(device):
    call, count = Tables(device, q_len=17, kv_lens=[40, 30]), 17
    out, rows = torch.empty_like(call.batch.q), call.batch.q.shape[0]
    mask = torch.zeros(rows, 2, dtype=torch.uint16, device=device)
    drafts = {"q": call.batch.q, "q_seq_len": count}
    for bad in (mask[1:], mask[:, :1]):  # a mask without a row; a mask whose words do not hold 17 bits
        with pytest.raises(ArgumentError, match=r"mask must have 34 rows of at least 17 bits"):
            call.xqa(out, **drafts, mask=bad)
        with pytest.raises(ArgumentError, match=r"mask must have 34 rows of at least 17 bits"):
            trtllm_batch_decode_with_kv_cache(*call.decode, q_len_per_req=count, mask=bad, kv_layout="NHD")
    apart = torch.empty(2, 20, *call.batch.q.shape[1:], dtype=F16, device=device)[:, :count]
    with pytest.raises(ArgumentError, match=r"xqa: output must be contiguous .*, got strides \(5120"):
        call.xqa(apart, **drafts, mask=mask)
    with pytest.raises(ArgumentError, match=r"trtllm.*: out must be contiguous .*, got strides \(5120"):
        trtllm_batch_decode_with_kv_cache(*call.decode, q_len_per_req=count, out=apart, kv_layout="NHD")
    for offsets, text in (
        ([0, 17, 33], "must have 3 offsets from 0 to 34 .*, got 3 from 0 to 33"),
        ([0, 34], "must have 3 offsets from 0 to 34 .*, got 2 from 0 to 34"),
        ([0, 18, 34], "a request must have at most q_seq_len = 17 draft tokens.*, got 18"),
        ([0, 40, 34], "q_cu_seq_lens must not decrease"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call.xqa(out, **drafts, mask=mask, q_cu_seq_lens=torch.tensor(offsets, device=device))


def test_dtype_of_trtllm_by_name(device):
    call = Tables(device, "HND")
    out = trtllm_batch_decode_with_kv_cache(*call.decode, SCALE, out_dtype="bfloat16")
    assert out.dtype == torch.bfloat16
    close(out, call.batch.expected(), 1e-2)


def test_bad_xqa(device):
    call = Tables(device)
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    with pytest.raises(AssertionError, match="mask must be a tensor"):
        call.xqa(out, q_seq_len=2)
    with pytest.raises(ValueError, match=r"output must be .*, got torch\.float8_e4m3fn"):
        call.xqa(out.to(FP8))
    query, cache, *rest = call.decode
    with pytest.raises(ArgumentError, match="kv_cache must have 5 dimensions"):
        xqa_batch_decode_with_kv_cache(query, cache[:, 0], *rest)
    with pytest.raises(ArgumentError, match=r"seq_lens must have 4 elements.*, got 3"):
        xqa_batch_decode_with_kv_cache(query, cache, *rest[:2], rest[2][:3], rest[3])
    with pytest.raises(ArgumentError, match="NVFP4 caches need SM12x"):
        xqa_batch_decode_with_kv_cache(query, cache.view(torch.uint8), *rest)
    for page_size, head_dim, text in (
        (8, 64, "page_size must be one of"),
        (16, 24, "head_dim must be a multiple of 16"),
    ):
        q = torch.empty(4, 1, 4, head_dim, dtype=F16, device=device)
        with pytest.raises(ValueError, match=text):
            flashinfer.xqa(q, q, q, q, q, q, q, q, 2, page_size)
