# SPDX-License-Identifier: Apache-2.0
"""BatchAttention and attention sinks: mixed batches, their options, and rejected arguments."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from flashinfer._runtime.errors import ArgumentError

from .inputs import LAYOUTS, Batch, strided
from .launches import kernels
from .mixed import KV_LENS, QO_LENS, planned
from .reference import Attention
from .wrappers import F16, close, decode_batch, workspace
from .wrappers import planned as planned_decode


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_mixed_batch(device, either_backend, layout, causal):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages = batch.pages(8)
    attention = planned(batch, pages, layout, causal=causal)
    expected = batch.expected(Attention(causal=causal))
    cache = batch.cache(pages, layout, "combined")
    close(attention.run(batch.q, cache), expected)
    close(attention.run(strided(batch.q, 16), cache), expected)
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2], device=device)
    result = attention.run(batch.q, cache, out=out, lse=lse)
    assert result[0] is out and result[1] is lse


@pytest.mark.parametrize("heads", [(7, 1), (8, 1), (4, 4)], ids=str)
def test_groups(device, either_backend, heads):
    batch = Batch(QO_LENS, KV_LENS, *heads, device=device)
    pages = batch.pages(1)
    close(planned(batch, pages, causal=True).run(batch.q, batch.cache(pages)), batch.expected(Attention(causal=True)))


def test_soft_cap_and_scales(device, either_backend):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages = batch.pages(8)
    attention = planned(batch, pages, logits_soft_cap=2.0, sm_scale=0.3)
    expected = batch.expected(Attention(logits_soft_cap=2.0, sm_scale=0.3, k_scale=0.5, v_scale=2.0))
    for cap in (0.0, 2.0, None):
        close(attention.run(batch.q, batch.cache(pages), k_scale=0.5, v_scale=2.0, logits_soft_cap=cap), expected)
    for cap, used in ((0.7, 0.7), (0.0, 2.0)):  # a non-zero cap given to run() replaces the cap of plan(), for one call
        expected = batch.expected(Attention(logits_soft_cap=used, sm_scale=0.3))
        close(attention.run(batch.q, batch.cache(pages), logits_soft_cap=cap), expected)


def test_pages_beyond_the_keys(device):
    """Check that a request may own more pages than its keys fill."""
    batch = Batch([5], [9], device=device)
    pages = batch.pages(8, spare=3)
    indices = torch.cat([pages.indices, torch.zeros_like(pages.indices)])
    attention = BatchAttention(device=device)
    indptr = torch.tensor([0, 4], dtype=torch.int32, device=device)
    attention.plan(batch.qo_indptr, indptr, indices, pages.lens, 4, 2, 64, 64, 8, q_data_type=F16, kv_data_type=F16)
    close(attention.run(batch.q, batch.cache(pages)), batch.expected())


def test_workspaces_have_their_published_names(device):
    attention = BatchAttention(device=device)
    assert attention.float_workspace_buffer.nbytes == 384 << 20
    assert attention.int_workspace_buffer.nbytes == attention.page_locked_int_workspace_buffer.nbytes == 8 << 20


def test_what_batch_attention_refuses(device):
    batch = Batch([2], [9], device=device)
    pages = batch.pages(8)
    attention = planned(batch, pages, use_profiler=True)
    with pytest.raises(ValueError, match=r"profiler_buffer must be a tensor .*, got None"):
        attention.run(batch.q, batch.cache(pages))
    buffer = torch.zeros(16, dtype=torch.uint64, device=device)
    with pytest.raises(ValueError, match=r"logits_soft_cap must be 0.*, got 3\.0"):
        attention.run(batch.q, batch.cache(pages), logits_soft_cap=3.0, profiler_buffer=buffer)
    tables = (batch.qo_indptr, pages.indptr, pages.indices)
    with pytest.raises(ValueError, match=r"head_dim must be at most 256.*, got 512 and 64"):
        attention.plan(*tables, pages.lens, 4, 2, 512, 64, 8)
    with pytest.raises(ArgumentError, match=r"kv_len_arr\[0\] must be at most 16.*, got 17"):
        attention.plan(*tables, pages.lens + 8, 4, 2, 64, 64, 8)
    with pytest.raises(ArgumentError, match=r"kv_len_arr must have shape \(1,\).*, got \(2,\)"):
        attention.plan(*tables, pages.lens.repeat(2), 4, 2, 64, 64, 8)


# Attention sinks ---------------------------------------------------------------------------------


def sink_wrapper(batch: Batch, pages, layout="NHD", window_left=-1, **options):
    types = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    dims = {"head_dim_qk": 64, "head_dim_vo": 64}
    wrapper = BatchAttentionWithAttentionSinkWrapper(
        workspace(batch.device), layout, window_left=window_left, **types, **dims
    )
    tables = (batch.qo_indptr, *pages.table)
    wrapper.plan(*tables, *batch.heads, 64, pages.page_size, window_left=window_left, **types, **options)
    return wrapper


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal, window_left", [(False, -1), (True, -1), (True, 6)])
def test_sinks(device, either_backend, layout, causal, window_left):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages = batch.pages(8)
    sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf], device=device)
    wrapper = sink_wrapper(batch, pages, layout, window_left, causal=causal)
    expected = batch.expected(Attention(causal=causal, window_left=window_left, sinks=sinks, sm_scale=0.2))
    cache = batch.cache(pages, layout, "combined")
    close(wrapper.run(batch.q, cache, sinks, 0.2, return_lse=True), expected)
    assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)


def test_sinks_count_once_however_keys_are_split(device, either_backend):
    batch = Batch([1, 1], [3000, 100], device=device)
    pages = batch.pages(16)
    sinks = torch.tensor([3.0, 5.0, 1.0, 0.0], device=device)
    expected = batch.expected(Attention(sinks=sinks))
    for options in ({}, {"fixed_split_size": 8}, {"disable_split_kv": True}):
        wrapper = sink_wrapper(batch, pages, **options)
        close(wrapper.run(batch.q, batch.cache(pages), sinks, 64**-0.5, return_lse=True), expected)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_sinks_of_the_plain_wrappers(device, tensor_cores):
    """Check sinks given to single calls of run(), a request without keys, and a sink of -inf, which has no effect."""
    batch = decode_batch(device, kv_lens=[0, 54, 97])
    pages = batch.pages(8)
    cache, sinks = batch.cache(pages), torch.tensor([0.5, -3.0, 4.0, -torch.inf], device=device)
    wrapper = planned_decode(batch, pages, tensor_cores=tensor_cores)
    plain, sunk = batch.expected(), batch.expected(Attention(sinks=sinks))
    for given, expected in ((None, plain), (sinks, sunk), (None, plain)):
        close(wrapper.run(batch.q, cache, sinks=given, return_lse=True), expected)
    out = torch.empty_like(batch.q)
    assert wrapper.run(batch.q, cache, out=out, sinks=sinks) is out
    torch.testing.assert_close(out.float(), sunk[0], rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\).*, got \(3,\)"):
        wrapper.run(batch.q, cache, sinks=sinks[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_of_a_plain_wrapper_are_added_in_one_launch(device, dtype):
    """Check that sinks are added in one launch, for results of any strides."""
    batch = Batch([5, 40], [33, 97], dtype=dtype, device=device)
    pages = batch.pages(8)
    cache, sinks = batch.cache(pages), torch.tensor([0.5, -3.0, 4.0, 1.0], device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8, q_data_type=dtype)
    out, lse = strided(torch.empty_like(batch.q), 8), torch.empty(len(batch.q), 4, device=device)
    wrapper.run(batch.q, cache, out=out, lse=lse, sinks=sinks[:, None].expand(4, 2)[:, 1], return_lse=True)
    expected = batch.expected(Attention(sinks=sinks))
    tolerance = 2e-3 if dtype is torch.float16 else 2e-2
    torch.testing.assert_close(out.float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected[1], rtol=1e-3, atol=1e-3)
    if device == "cuda":
        plain = kernels(lambda: wrapper.run(batch.q, cache, out=out, return_lse=True))
        assert len(kernels(lambda: wrapper.run(batch.q, cache, out=out, sinks=sinks))) == len(plain) + 1


def test_sinks_of_any_strides_and_dtype(device):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages, sinks = batch.pages(8), torch.randn(4, device=device).half()
    expected = batch.expected(Attention(sinks=sinks.float()))
    wrapper = sink_wrapper(batch, pages)
    for given in (sinks, sinks.float().repeat_interleave(2)[::2]):
        close(wrapper.run(batch.q, batch.cache(pages), given, 0.125, return_lse=True), expected)


@pytest.mark.parametrize("given", [(0.4,), ()], ids=["sm_scale given", "sm_scale planned"])
def test_scales_of_stored_values_and_sinks(device, given):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages, sinks = batch.pages(8), torch.randn(4, device=device)
    wrapper = sink_wrapper(batch, pages, sm_scale=0.4)
    expected = batch.expected(Attention(sinks=sinks, sm_scale=0.1, v_scale=2.0))
    for scale in (0.5, torch.tensor(0.5, device=device)):
        scales = {"q_scale": 0.5, "k_scale": scale, "v_scale": 2.0, "return_lse": True}
        close(wrapper.run(batch.q, batch.cache(pages), sinks, *given, **scales), expected, 4e-3)


def test_what_sinks_refuse(device):
    batch = Batch(QO_LENS, KV_LENS, device=device)
    pages, sinks = batch.pages(8), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"sink must have shape \(4,\).*, got \(3,\)"):
        sink_wrapper(batch, pages).run(batch.q, batch.cache(pages), sinks[:3], 0.2)
    mask = torch.ones(sum(a * b for a, b in zip(QO_LENS, KV_LENS, strict=True)), dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=r"a custom mask and prefix_len_ptr must not be given"):
        sink_wrapper(batch, pages, custom_mask=mask)
    with pytest.raises(ValueError, match=r"logits_soft_cap must be None.*, got 3\.0"):
        sink_wrapper(batch, pages, logits_soft_cap=3.0)
    with pytest.raises(ValueError, match="a variant of jit_args has its own"):
        sink_wrapper(batch, pages).run(batch.q, batch.cache(pages), sinks, 0.2, sinks=sinks)
    with pytest.raises(AssertionError, match=r"backend must be one of auto, fa2, fa3.*, got 'cudnn'"):
        BatchAttentionWithAttentionSinkWrapper(workspace(device), backend="cudnn")
    with pytest.raises(ArgumentError, match="pos_encoding_mode must be 'NONE' or 'ROPE_LLAMA', got 'ALIBI'"):
        BatchAttentionWithAttentionSinkWrapper(workspace(device), pos_encoding_mode="ALIBI")
    with pytest.raises(KeyError, match=r"pos_encoding_mode must be one of .*, got 'rope'"):
        BatchAttentionWithAttentionSinkWrapper(workspace(device), pos_encoding_mode="rope")
