# SPDX-License-Identifier: Apache-2.0
"""Calls and wrappers beyond decode and prefill inside ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache

from ..cascade.tree import Tree
from ..sparse import inputs as sparse_inputs
from . import mixed
from .inputs import Batch
from .tables import SCALE, Tables, workspace


def check(run, *tensors: torch.Tensor) -> None:
    """Check that the compiled graph equals eager and that the rest of the graph is kept."""

    def model(*inputs: torch.Tensor) -> torch.Tensor:
        return run(*(x * 1 for x in inputs)) * 2

    torch._dynamo.reset()  # all runs share one code object: without the reset each run counts as a recompilation
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(compiled, model(*tensors))


@pytest.mark.parametrize("use_sinks", [False, True])
def test_decode_over_page_tables(device, use_sinks):
    call = Tables(device, "HND")
    query, cache, *rest = call.decode
    sinks = torch.zeros(4, device=device) if use_sinks else None

    def run(q: torch.Tensor) -> torch.Tensor:
        return trtllm_batch_decode_with_kv_cache(q, cache, *rest, bmm1_scale=SCALE, bmm2_scale=2.0, sinks=sinks)

    check(run, query)


def test_xqa(device):
    call = Tables(device)

    def run(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        k, v = call.cache.unbind(1)
        lens = call.pages.lens.unsqueeze(1)
        flashinfer.xqa(q, k, v, call.tables, lens, out, call.workspace, call.workspace, 2, 16, kv_scale=2.0)
        return out

    check(run, call.batch.q.unsqueeze(1))


def test_wrappers(device):
    batch = Batch(mixed.QO_LENS, mixed.KV_LENS, device=device)
    pages = batch.pages(8)
    attention, cache = mixed.planned(batch, pages, causal=True), batch.cache(pages)
    check(lambda q: attention.run(q, cache)[0], batch.q)
    tree = Tree(device, "NHD", [[40], [5, 1, 0, 17]], [[4], [1, 1, 1, 1]])
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    cascade.plan(tree.qo_indptr, *tree.tables(), 4, 2, 64, 8)
    check(lambda q: cascade.run(q, tree.cache), tree.q)
    indptr, indices, _ = sparse_inputs.pattern_of(40, 64, 16, 8, 0.5)
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sparse.plan(indptr, indices, 40, 64, 16, 8, 4, 2, 64)
    check(sparse.run, *sparse_inputs.tensors(40, 64, device))
