# SPDX-License-Identifier: Apache-2.0
"""Trace definitions of calls over page tables and of MLA, and their references."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

from ..mla.latent import F16, SCALE, Latent
from ..mla.latent import close as close_latent
from ..sparse import inputs as sparse_inputs
from . import mixed
from .definitions import run_definition, run_reference
from .inputs import Batch
from .tables import Tables, close, workspace


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_decode_calls(layout, pair):
    call = Tables("cpu", layout)
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")
    arguments: dict[str, Any] = dict(zip(names, call.decode, strict=True))
    if pair:
        arguments["kv_cache"] = tuple(call.cache.unbind(1))
    arguments |= {"bmm1_scale": 0.2, "bmm2_scale": 2.0, "kv_layout": layout, "window_left": 7}
    for api in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        definition = api.fi_trace(**arguments)
        inputs = arguments | dict(zip(("k_cache", "v_cache"), call.cache.unbind(1), strict=True))
        if "window_left" in definition["inputs"]:
            expected = run_definition(definition, inputs)
        else:  # as published
            expected = run_reference(api, definition, arguments)
        close(api(**arguments), [expected.float()])


def test_xqa():
    call = Tables("cpu")
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    call.xqa(out, q_scale=0.5, sliding_win_size=7)
    k, v = call.cache.unbind(1)
    arguments = {"q": call.batch.q.unsqueeze(1), "k_cache": k, "v_cache": v, "page_table": call.tables}
    arguments |= {"seq_lens": call.pages.lens.unsqueeze(1), "output": out, "q_scale": 0.5, "sliding_win_size": 7}
    rest = {"workspace_buffer": call.workspace, "semaphores": call.workspace, "num_kv_heads": 2, "page_size": 16}
    definition = flashinfer.xqa.fi_trace(**arguments, **rest)
    assert definition["name"] == "xqa_h4_kv2_d64_ps16"
    close(out, [run_reference(flashinfer.xqa, definition, arguments).float()])


def test_latent_attention():
    batch = Latent("cpu")
    wrapper = batch.wrapper(True)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    arguments = dict(zip(names, batch.arguments, strict=True))
    definition = wrapper.run.fi_trace(wrapper, **arguments)
    assert definition["name"].startswith("mla_paged_decode_h16_ckv512_kpe64_ps16")
    tables = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), batch.tables, strict=True))
    result, expected_lse = run_reference(
        wrapper.run, definition, {**arguments, **tables, "causal": True, "sm_scale": SCALE}
    )
    assert result.dtype == F16
    close_latent(wrapper.run(*batch.arguments, return_lse=True), (result.float(), expected_lse))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["combined", "pair"])
def test_batch_attention(layout, form):
    batch = Batch(mixed.QO_LENS, mixed.KV_LENS)
    pages = batch.pages(8)
    attention, cache = mixed.planned(batch, pages, layout, causal=True), batch.cache(pages, layout, form)
    definition = attention.run.fi_trace(attention, q=batch.q, kv_cache=cache)
    k, v = cache if form == "pair" else cache.unbind(1)
    tables = {"qo_indptr": batch.qo_indptr, "kv_indptr": pages.indptr, "kv_indices": pages.indices}
    options = {"kv_len_arr": pages.lens, "causal": True, "sm_scale": None}
    inputs = {"q": batch.q, "kv_cache": cache, "k_cache": k, "v_cache": v, **tables, **options}
    run = run_definition if layout == "HND" else partial(run_reference, attention.run)
    out, lse = run(definition, inputs)
    close_latent(attention.run(batch.q, cache), (out.float(), lse))


def test_block_sparse():
    indptr, indices, _ = sparse_inputs.pattern_of(40, 64, 16, 8, 0.5)
    q, k, v = sparse_inputs.tensors(40, 64, "cpu")
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(indptr, indices, 40, 64, 16, 8, 4, 2, 64)
    definition = wrapper.run.fi_trace(wrapper, q=q, k=k, v=v)
    inputs = {"q": q, "k": k, "v": v, "indptr": indptr, "indices": indices, "R": 16, "C": 8, "sm_scale": None}
    assert definition["name"] == "block_sparse_run_h4_kv2_d64"
    close(wrapper.run(q, k, v), [run_reference(wrapper.run, definition, inputs).float()])


def test_variable_block_sparse():
    pattern = torch.rand(2, 3, 4) < 0.5
    rows, columns = (torch.tensor([sparse_inputs.cut(n, parts) for _ in range(2)]) for n, parts in ((30, 3), (50, 4)))
    q, k, v = (torch.randn(heads, n, 64).half() for heads, n in ((4, 30), (2, 50), (2, 50)))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(pattern, rows, columns, 4, 2, 64)
    definition = wrapper.run.fi_trace(wrapper, q=q, k=k, v=v)
    inputs = {"block_mask_map": pattern, "block_row_sz": rows, "block_col_sz": columns, "sm_scale": None}
    assert definition["name"] == "var_block_sparse_run_h30_kv50_d64"  # as published: it takes tokens for heads
    expected = run_reference(wrapper.run, definition, {"q": q, "k": k, "v": v, **inputs})
    close(wrapper.run(q, k, v), [expected.float()])
