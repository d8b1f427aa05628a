# SPDX-License-Identifier: Apache-2.0
"""Attention inside torch.compile: one graph, and a plan made after compiling is the plan that runs."""

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
    """Plan any kind of wrapper and return the arguments of ``run``."""
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
    """Check that plan() breaks a graph, because it runs on the host, and that fullgraph errors explain it."""
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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["decode", "ragged", "latent"])
def test_exported_wrappers_take_any_batch(device, kind, strict):
    """Check exported programs: rows, keys and pages come from the plan at run time, not at export time."""
    wrapper = {
        "decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        "ragged": flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        "latent": flashinfer.mla.BatchMLAPagedAttentionWrapper,
    }[kind](calls.workspace(device))
    what = Attention(causal=kind == "ragged")

    class Model(torch.nn.Module):
        def forward(self, q, *keys):
            if kind == "latent":
                keys = (q[..., :0], keys[0], keys[0][..., :0])
            return wrapper.run(q * 1, *keys, return_lse=True)

    def prepare(kv_lens):
        dims = (4, 1, 128) if kind == "latent" else ()
        batch = Batch([1] * len(kv_lens), kv_lens, *dims, latent=kind == "latent", device=device)
        if kind != "latent":
            return batch, plan(wrapper, batch)
        pages, options = batch.pages(PAGE_SIZE), (4, 128, 0, PAGE_SIZE, False, 128**-0.5, torch.float16, torch.float16)
        wrapper.plan(batch.qo_indptr, pages.indptr, pages.indices, pages.lens, *options)
        return batch, (batch.q, pages.scatter(batch.k, "NHD")[:, :, 0].contiguous())

    rows, other = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("other", min=1, max=4096)
    arguments = prepare([70, 3, 9])[1]
    shapes = ({0: rows}, ({0: other},) * (len(arguments) - 1))
    program = torch.export.export(Model(), arguments, dynamic_shapes=shapes, strict=strict).module()
    for kv_lens in ([70, 3, 9], [5], [1, 33, 64, 2]):
        batch, arguments = prepare(kv_lens)
        calls.check(program(*arguments), batch.expected(what), batch.dtype)
    with pytest.raises(ValueError, match=r"q(_nope)? must have 4 .*, got 3"):
        program(arguments[0][:3], *arguments[1:])
    if kind == "ragged":
        with pytest.raises(ValueError, match=r"k must have 100 tokens .*, got 50 tokens of 2 heads"):
            program(arguments[0], arguments[1][:50], arguments[2][:50])


def test_graphs_look_at_pages_and_rows_of_latent_attention(device):
    torch._dynamo.reset()
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(calls.workspace(device))
    ids, tables = torch.arange(8), [torch.tensor(x) for x in ([0, 2, 5], [0, 3, 8], [20, 33])]
    q, cache = torch.randn(5, 4, 128, device=device).half(), torch.randn(8, PAGE_SIZE * 2, 128, device=device).half()

    def prepare(indices):
        options = (4, 128, 0, PAGE_SIZE * 2, False, 0.1, torch.float16, torch.float16)
        wrapper.plan(*tables[:2], indices, tables[2], *options)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def model(q, cache):
        return wrapper.run(q * 1, q[..., :0], cache, cache[..., :0])

    prepare(ids)
    assert torch.equal(model(q, cache), wrapper.run(q, q[..., :0], cache, cache[..., :0]))
    with pytest.raises(ValueError, match=r"q_nope must have 5 rows \(qo_indptr\[-1\]\).*, got 4"):
        model(q[:4], cache)
    prepare(ids.masked_fill(ids == 6, 1 << 24))
    if device == "cpu":  # on a GPU only with FLASHINFER_VALIDATE_INPUTS
        with pytest.raises(ValueError, match=rf"kv_indices\[6\] must be 0 to 7.*, got {1 << 24}"):
            model(q, cache)
