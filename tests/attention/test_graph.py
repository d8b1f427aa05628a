# SPDX-License-Identifier: Apache-2.0
"""Wrappers in CUDA graphs: a replay follows the latest plan, whatever lengths the captured plan had."""

from __future__ import annotations

import functools

import pytest
import torch

import flashinfer

from ..graphs import capture
from . import calls
from .inputs import Batch
from .reference import Attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

PAGE_SIZE = 16
MAX_PAGES = 512
DECODE_LENGTHS = [[40, 40, 40, 40], [1, 2, 3, 4], [3000, 1, 500, 17], [16, 4096, 2000, 900]]


def empty(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def fill(cache, batch, pages, order):
    """Write the keys of ``batch`` into a pool that keeps its address."""
    for pool, rows in zip(cache, (batch.k, batch.v), strict=True):
        pool.fill_(torch.nan)
        pool[: pages.num_pages].copy_(pages.scatter(rows, order))


def decode_wrapper(tensor_cores: bool):
    """Return a decode wrapper for graphs of four requests."""
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        calls.workspace("cuda"),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=empty(5),
        paged_kv_indices_buffer=empty(MAX_PAGES),
        paged_kv_last_page_len_buffer=empty(4),
    )


@pytest.mark.parametrize(
    "tensor_cores, q_len, split",
    [
        (False, 1, {}),
        (False, 1, {"disable_split_kv": True}),
        (True, 1, {}),
        (True, 3, {}),
        (True, 1, {"fixed_split_size": 8}),
        (True, 3, {"disable_split_kv": True}),
    ],
)
def test_decode(tensor_cores, q_len, split):
    wrapper = decode_wrapper(tensor_cores)
    q = empty(4 * q_len, 8, 64, dtype=torch.float16)
    cache = tuple(empty(MAX_PAGES + 3, PAGE_SIZE, 2, 64, dtype=torch.float16) for _ in range(2))
    what = Attention(causal=q_len > 1)
    graph = None
    for lengths in DECODE_LENGTHS:
        batch = Batch([q_len] * 4, [max(n, q_len) for n in lengths], 8, 2, 64, device="cuda")
        pages = batch.pages(PAGE_SIZE)
        wrapper.plan(*pages.table, *batch.heads, 64, PAGE_SIZE, q_data_type=torch.float16, q_len_per_req=q_len, **split)
        q.copy_(batch.q)
        fill(cache, batch, pages, "NHD")
        if graph is None:
            graph, result = capture(lambda: wrapper.run(q, cache, return_lse=True))
        graph.replay()
        calls.check(result, batch.expected(what), torch.float16)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_plans_without_what_forward_was_captured_with(tensor_cores, head_dim):
    """Check plans without a soft cap and a captured forward() with one, as engines do: replays apply the soft cap."""
    wrapper = decode_wrapper(tensor_cores)
    q = empty(4, 8, head_dim, dtype=torch.float16)
    cache = tuple(empty(MAX_PAGES + 3, PAGE_SIZE, 2, head_dim, dtype=torch.float16) for _ in range(2))
    graph = None
    for lengths in DECODE_LENGTHS:
        batch = Batch([1] * 4, lengths, 8, 2, head_dim, device="cuda")
        pages = batch.pages(PAGE_SIZE)
        wrapper.begin_forward(*pages.table, *batch.heads, head_dim, PAGE_SIZE, q_data_type=torch.float16)
        q.copy_(batch.q)
        fill(cache, batch, pages, "NHD")
        if graph is None:
            graph, result = capture(lambda: wrapper.forward(q, cache, logits_soft_cap=0.5))
        graph.replay()
        calls.check((result, None), batch.expected(Attention(logits_soft_cap=0.5)), torch.float16)


@pytest.mark.parametrize(
    "requests, kv_len, heads",
    [(1, 1024, (32, 8)), (16, 2048, (32, 8)), (4, 1000, (16, 1)), (1, 500, (8, 8)), (64, 4096, (8, 1))],
)
def test_requests_that_are_cut_alike_are_what_lists_make_of_them(requests, kv_len, heads):
    """Check equal results with and without a list of work items: plans for graphs have lists, and other plans of equal
    requests compute the items in the kernel, where clusters merge the partials if they fit.
    """
    batch = Batch([1] * requests, [kv_len] * requests, *heads, 64, device="cuda")
    pages = batch.pages(PAGE_SIZE)
    cache, buffers = batch.cache(pages, "NHD"), (requests + 1, pages.num_pages, requests)
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    results = []
    for options in ({}, {"use_cuda_graph": True, **{k: empty(n) for k, n in zip(names, buffers, strict=True)}}):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            calls.workspace("cuda"), "NHD", use_tensor_cores=True, **options
        )
        wrapper.plan(*pages.table, *batch.heads, 64, PAGE_SIZE, q_data_type=torch.float16)
        results += [wrapper.run(batch.q, cache, return_lse=True) for _ in range(2)]
    calls.check(results[0], batch.expected(), torch.float16)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


PREFILL_LENGTHS = [
    ([100, 1, 60, 95], [300, 20, 61, 95]),  # the first plan sets the row count of all later plans
    ([1, 1, 1, 1], [4000, 7, 0, 16]),
    ([0, 256, 0, 0], [5, 256, 0, 1]),
    ([64, 64, 64, 64], [64, 1000, 65, 129]),
]


@pytest.mark.parametrize("masked, split", [(False, {}), (True, {}), (False, {"fixed_split_size": 8})])
def test_paged_prefill(masked, split):
    masks = {"custom_mask_buf": empty(1 << 20, dtype=torch.uint8), "mask_indptr_buf": empty(5)} if masked else {}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        calls.workspace("cuda"),
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=empty(5),
        paged_kv_indptr_buf=empty(5),
        paged_kv_indices_buf=empty(MAX_PAGES),
        paged_kv_last_page_len_buf=empty(4),
        **masks,
    )
    q = empty(256, 8, 64, dtype=torch.float16)
    cache = tuple(empty(MAX_PAGES + 3, 2, PAGE_SIZE, 64, dtype=torch.float16) for _ in range(2))
    graph = None
    for qo_lens, kv_lens in PREFILL_LENGTHS:
        batch = Batch(qo_lens, kv_lens, 8, 2, 64, device="cuda")
        pages, rows = batch.pages(PAGE_SIZE), sum(qo_lens)
        what = Attention(causal=True)
        if masked:
            what = [
                Attention(mask=torch.rand(a, b, device="cuda") < 0.5) for a, b in zip(qo_lens, kv_lens, strict=True)
            ]
        wrapper.plan(
            batch.qo_indptr,
            *pages.table,
            *batch.heads,
            64,
            PAGE_SIZE,
            causal=not masked,
            custom_mask=calls.masks(what),
            q_data_type=torch.float16,
            **split,
        )
        q[:rows].copy_(batch.q)
        fill(cache, batch, pages, "HND")
        if graph is None:
            graph, (o, lse) = capture(lambda: wrapper.run(q, cache, return_lse=True))
        graph.replay()
        calls.check((o[:rows], lse[:rows]), batch.expected(what), torch.float16)


@pytest.mark.parametrize("warm", [False, True])
def test_plans_without_the_causal_that_forward_was_captured_with(warm):
    """Check SGLang's use: plan without ``causal``, then capture ``forward`` with it. The captured ``forward`` must not
    plan, even if nothing ran before the capture.
    """
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        *(calls.workspace("cuda"), "HND", True, empty(5), empty(5), empty(MAX_PAGES), empty(4))
    )
    q = empty(256, 8, 64, dtype=torch.float16)
    cache = tuple(empty(MAX_PAGES + 3, 2, PAGE_SIZE, 64, dtype=torch.float16) for _ in range(2))
    graph = None
    for qo_lens, kv_lens in PREFILL_LENGTHS:
        batch = Batch(qo_lens, kv_lens, 8, 2, 64, device="cuda")
        pages, rows = batch.pages(PAGE_SIZE), sum(qo_lens)
        wrapper.begin_forward(batch.qo_indptr, *pages.table, *batch.heads, 64, PAGE_SIZE)
        q[:rows].copy_(batch.q)
        fill(cache, batch, pages, "HND")
        if graph is None:
            if not warm:
                wrapper.run(q, cache)  # loads the module
            torch.cuda.synchronize()
            step = functools.partial(wrapper.forward_return_lse, q, cache, causal=True)
            if warm:
                graph, (o, lse) = capture(step)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    o, lse = step()
        graph.replay()
        calls.check((o[:rows], lse[:rows]), batch.expected(Attention(causal=True)), torch.float16)


def test_ragged_prefill():
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        calls.workspace("cuda"), use_cuda_graph=True, qo_indptr_buf=empty(5), kv_indptr_buf=empty(5)
    )
    q, k, v = (empty(n, heads, 64, dtype=torch.float16) for n, heads in ((256, 8), (4096, 2), (4096, 2)))
    graph = None
    for qo_lens, kv_lens in PREFILL_LENGTHS:
        batch = Batch(qo_lens, kv_lens, 8, 2, 64, device="cuda")
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, causal=True, q_data_type=torch.float16)
        for buffer, rows in ((q, batch.q), (k, batch.k), (v, batch.v)):
            buffer.fill_(torch.nan)[: len(rows)].copy_(rows)
        if graph is None:
            graph, (o, lse) = capture(lambda: wrapper.run(q, k, v, return_lse=True))
        graph.replay()
        rows = sum(qo_lens)
        calls.check((o[:rows], lse[:rows]), batch.expected(Attention(causal=True)), torch.float16)


@pytest.mark.parametrize("q_len", [1, 3])
def test_latent_attention(q_len):
    """Check lengths beyond those of the captured plan, and requests without keys."""
    shape = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "latent": True}
    buffers = {"qo_indptr": empty(5), "kv_indptr": empty(5), "kv_indices": empty(MAX_PAGES), "kv_len_arr": empty(4)}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(calls.workspace("cuda"), use_cuda_graph=True, **buffers)
    q = empty(4 * q_len, 16, 576, dtype=torch.float16)
    ckv, kpe = (empty(MAX_PAGES + 3, PAGE_SIZE, n, dtype=torch.float16) for n in (512, 64))
    scale, graph = 192**-0.5, None
    what = Attention(causal=True, sm_scale=scale)
    for lengths in DECODE_LENGTHS:
        batch = Batch([q_len] * 4, [max(n, q_len) for n in lengths], device="cuda", **shape)
        pages = batch.pages(PAGE_SIZE)
        tables = (batch.qo_indptr, pages.indptr, pages.indices, pages.lens)
        wrapper.plan(*tables, 16, 512, 64, PAGE_SIZE, True, scale, torch.float16, torch.float16)
        q.copy_(batch.q)
        for pool, rows in ((ckv, batch.k[..., :512]), (kpe, batch.k[..., 512:])):
            pool.fill_(torch.nan)
            pool[: pages.num_pages].copy_(pages.scatter(rows.contiguous(), "NHD").squeeze(2))
        if graph is None:
            graph, result = capture(lambda: wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, return_lse=True))
        graph.replay()
        calls.check(result, batch.expected(what), torch.float16)


def test_single_requests_can_be_captured():
    batch = Batch([1], [777], 8, 2, 64, device="cuda")
    for call in (calls.single_decode, calls.single_prefill):
        graph, result = capture(lambda call=call: call(batch, Attention()))
        result[0].zero_()
        graph.replay()
        calls.check(result, batch.expected(), torch.float16)


def test_single_decode_on_streams_beside_a_graph():
    """Check that each stream counts its own partials, and that a captured call uses no counters."""
    batch = Batch([1], [9000], 8, 2, 64, device="cuda")
    graph, captured = capture(lambda: calls.single_decode(batch, Attention()))
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(calls.single_decode(batch, Attention()))
        graph.replay()
    torch.cuda.synchronize()
    calls.check(captured, batch.expected(), torch.float16)
    for result in results:
        assert torch.equal(result[0], captured[0]) and torch.equal(result[1], captured[1])


def test_other_wrappers_refuse_to_be_captured():
    batch = Batch([1, 1], [20, 30], 8, 2, 64, device="cuda")
    pages = batch.pages(PAGE_SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(calls.workspace("cuda"))
    wrapper.plan(*pages.table, *batch.heads, 64, PAGE_SIZE, q_data_type=torch.float16)
    cache = batch.cache(pages)
    with pytest.raises(ValueError, match="the wrapper must be made with use_cuda_graph=True"):
        capture(lambda: wrapper.run(batch.q, cache))
