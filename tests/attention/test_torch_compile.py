# SPDX-License-Identifier: Apache-2.0
"""Attention inside torch.compile: one graph, and a plan made after compiling is the one that runs."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from . import calls
from .inputs import Batch
from .reference import Attention

PAGE_SIZE = 4
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def plan(wrapper, batch):
    """Plan whichever wrapper it is; returns what ``run`` takes."""
    pages = batch.pages(PAGE_SIZE)
    if isinstance(wrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        wrapper.plan(*pages.table, *batch.heads, 64, PAGE_SIZE, q_data_type=batch.dtype)
        return batch.q, batch.cache(pages, form="combined")
    if isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, PAGE_SIZE, causal=True, q_data_type=batch.dtype)
        return batch.q, batch.cache(pages, form="combined")
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, causal=True, q_data_type=batch.dtype)
    return batch.q, batch.k, batch.v


@backends
@pytest.mark.parametrize(
    "kind",
    [
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    ],
    ids=lambda kind: kind.__name__,
)
def test_wrappers(device, kind, backend):
    torch._dynamo.reset()
    wrapper = kind(calls.workspace(device))
    decode = kind is flashinfer.BatchDecodeWithPagedKVCacheWrapper
    what = Attention(causal=not decode)

    @torch.compile(fullgraph=True, backend=backend)
    def model(*tensors):
        o, lse = wrapper.run(*(x * 1 for x in tensors), return_lse=True)
        return o * 2, lse + 1

    for kv_lens in ([70, 3, 9], [1, 333, 64]):
        batch = Batch([1, 1, 1] if decode else [1, 2, 6], [max(n, 6) for n in kv_lens], device=device)
        o, lse = model(*plan(wrapper, batch))
        calls.check((o / 2, lse - 1), batch.expected(what), batch.dtype)


@backends
def test_single_requests(device, backend):
    torch._dynamo.reset()
    batch = Batch([7], [50], device=device)

    @torch.compile(fullgraph=True, backend=backend)
    def model(q, k, v):
        o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
        return o, flashinfer.single_decode_with_kv_cache(o[-1] * 1, k, v, return_lse=True)

    o, (last, lse) = model(batch.q, batch.k, batch.v)
    expected, _ = batch.expected(Attention(causal=True))
    torch.testing.assert_close(o.float(), expected, rtol=2e-3, atol=2e-3)
    calls.check((last[None], lse[None]), Attention()(o[-1:], batch.k, batch.v), batch.dtype)


def test_plans_are_not_part_of_a_graph(device):
    """They work on the host: a graph is broken there, and where it must not be, the error says why."""
    torch._dynamo.reset()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(calls.workspace(device))

    def model(q, k, v, qo_indptr, kv_indptr):
        wrapper.plan(qo_indptr, kv_indptr, 4, 2, 64, causal=True)
        return wrapper.run(q * 1, k, v, return_lse=True)

    for qo_lens, kv_lens in (([1, 2, 6], [70, 3, 9]), ([4, 1], [5, 64])):
        batch = Batch(qo_lens, kv_lens, device=device)
        tensors = batch.q, batch.k, batch.v, batch.qo_indptr, batch.kv_indptr
        calls.check(
            torch.compile(model, backend="eager")(*tensors), batch.expected(Attention(causal=True)), batch.dtype
        )
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"KVCacheWrapper.plan\(\) works on the host, call it before"
    ):
        torch.compile(model, backend="eager", fullgraph=True)(*tensors)
