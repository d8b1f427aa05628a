# SPDX-License-Identifier: Apache-2.0
"""The form of MLA's plan and run that declares tables, layouts, LSE, scales and sinks."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer import BatchMLAPagedAttentionWrapper
from flashinfer.mla import MLAPlanMetadata

from .latent import BF16, CKV, F16, FP8, HEADS, KPE, KV_LENS, QO_LENS, SCALE, Latent, close, workspace

SIZES = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": 16, "sm_scale": SCALE}


@pytest.fixture(scope="module")
def batch():
    return Latent("cpu")


def dense_of(batch: Latent) -> dict[str, torch.Tensor]:
    """The batch's tables with a row of page ids for each request; what follows them is no page."""
    rows, begins, pages, lens = (x.cpu() for x in batch.tables)
    counts = begins.diff().tolist()
    table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = pages[begins[i] : begins[i] + count]
    tables = {"cum_seq_lens_q": rows, "block_tables": table, "seq_lens": lens}
    return {name: x.to(batch.device) for name, x in tables.items()}


def planned(batch: Latent, **options) -> BatchMLAPagedAttentionWrapper:
    wrapper = BatchMLAPagedAttentionWrapper(workspace(batch.device))
    types = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    wrapper.plan(**SIZES | types | {"causal": False} | options)
    return wrapper


def packed(batch: Latent) -> dict[str, torch.Tensor]:
    q, k = torch.cat([batch.q_nope, batch.q_pe], -1), torch.cat([x.float() for x in batch.caches], -1)
    return {"query": q, "kv_cache": k.to(batch.kv_dtype)}


def pairs(batch: Latent) -> dict[str, tuple[torch.Tensor, ...]]:
    return {"query": (batch.q_nope, batch.q_pe), "kv_cache": batch.caches}


def metadata_of(form: str, batch: Latent) -> MLAPlanMetadata:
    if form == "csr":
        return MLAPlanMetadata.csr(*batch.tables)
    if form == "dense":
        return MLAPlanMetadata.dense(**dense_of(batch), max_q_len=max(QO_LENS))
    return MLAPlanMetadata.dual(*batch.tables, **dense_of(batch))


@pytest.mark.parametrize("form", ["csr", "dense", "dual"])
def test_metadata_with_packed_tensors(device, form):
    batch = Latent(device)
    wrapper = planned(batch, metadata=metadata_of(form, batch), lse_mode="base2", causal=True)
    close(wrapper.run(**packed(batch), return_lse=True), batch.expected(True))


def test_flat_tables_with_pairs(device):
    batch = Latent(device)
    wrapper = planned(batch, **dense_of(batch), lse_mode="basee")
    out, lse = wrapper.run(**pairs(batch), return_lse=True)
    close((out, lse / math.log(2)), batch.expected())
    again = wrapper.run(*batch.arguments, return_lse=True, return_lse_base_on_e=True)  # the older form is a pair too
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_older_plan_takes_new_arguments_of_run(device):
    """And a plan in the older form forgets what the plan before it declared."""
    batch = Latent(device)
    wrapper = planned(batch, metadata=metadata_of("csr", batch))
    batch.plan(wrapper)
    close(wrapper.run(**pairs(batch), return_lse=True), batch.expected())
    close(
        wrapper.run(query=pairs(batch)["query"], kv_cache=packed(batch)["kv_cache"], return_lse=True), batch.expected()
    )
    close(wrapper.run(*batch.arguments, return_lse=True), batch.expected())


def test_fp8_cache_with_scales_of_products(device):
    """``bmm1_scale`` is the whole scale of the logits, ``bmm2_scale`` that of the output: both contain the cache's."""
    batch = Latent(device, dtype=BF16, kv_dtype=FP8)
    wrapper = planned(batch, metadata=metadata_of("dense", batch), scale_mode="bmm-scalar", lse_mode="base2")
    result = wrapper.run(**packed(batch), return_lse=True, bmm1_scale=SCALE * 0.5, bmm2_scale=0.5)
    close(result, batch.expected(ckv=batch.ckv.float() * 0.5, kpe=batch.kpe.float() * 0.5), 2e-2)
    by_tensor = planned(batch, metadata=metadata_of("dense", batch), scale_mode="kv-per-tensor", lse_mode="base2")
    out, lse = by_tensor.run(**packed(batch), return_lse=True, ckv_scale=0.5, kpe_scale=0.5)
    close((out, lse), (result[0].float(), result[1]), 2e-2)


def test_sinks(device):
    batch, sinks = Latent(device), torch.linspace(-1, 6, HEADS, device=device)
    wrapper = planned(batch, metadata=metadata_of("csr", batch), use_sinks=True, lse_mode="basee")
    out, lse = wrapper.run(**packed(batch), return_lse=True, sinks=sinks)
    values, scores = batch.expected()
    total = torch.logaddexp(scores * math.log(2), sinks.expand_as(scores))
    close((out, lse), (values * (scores * math.log(2) - total).exp().unsqueeze(-1), total))


def test_cuda_graph_buffers_take_dense_tables(device):
    batch = Latent(device)
    rows, pages, indices, lens = batch.tables
    buffers = (torch.empty_like(rows), torch.empty_like(pages), torch.zeros_like(indices), torch.empty_like(lens))
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
    types = {"q_data_type": F16, "kv_data_type": F16, "causal": False}
    wrapper.plan(**SIZES | types, metadata=metadata_of("dense", batch), lse_mode="base2")
    close(wrapper.run(**packed(batch), return_lse=True), batch.expected())


PLANS = [
    ({"metadata": "csr", "qo_indptr": "qo_indptr"}, ValueError, "qo_indptr must be None"),
    ({"qo_indptr": "qo_indptr", "block_tables": "block_tables"}, ValueError, "cannot be mixed"),
    ({}, TypeError, "must be given, got none"),
    ({"qo_indptr": "qo_indptr"}, TypeError, "kv_indptr must be Tensor"),
    ({"block_tables": "block_tables"}, TypeError, "cum_seq_lens_q must be Tensor"),
    ({"metadata": "csr", "num_heads": None}, TypeError, "num_heads must be given, got None"),
    ({"metadata": "csr", "lse_mode": "ln"}, ValueError, "lse_mode must be 'none', 'base2', 'basee'"),
    ({"metadata": "csr", "query_layout": "flat"}, ValueError, "query_layout must be"),
    ({"metadata": "csr", "scale_mode": "bmm-tensor"}, ValueError, "needs an SM100 device"),
    ({"metadata": "csr", "output_scale": "per-tensor"}, ValueError, "output_scale must be 'none'"),
    ({"metadata": "csr", "output_dtype": torch.float32}, ValueError, "output_dtype must be torch.float16"),
    ({"metadata": "csr", "skip_softmax": True}, ValueError, "skip_softmax must be False"),
    ({"metadata": "short"}, ValueError, "max_q_len must be at least 17"),
]


@pytest.mark.parametrize("options, kind, text", PLANS)
def test_refused_plans(batch, options, kind, text):
    tables = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), batch.tables, strict=True))
    made = {"csr": MLAPlanMetadata.csr(*batch.tables), "short": MLAPlanMetadata.dense(**dense_of(batch), max_q_len=2)}
    values = tables | dense_of(batch) | made
    given = {name: values[x] if isinstance(x, str) and x in values else x for name, x in options.items()}
    with pytest.raises(kind, match=text):
        planned(batch, **given)


def test_tables_that_disagree(batch):
    dense = dense_of(batch)
    with pytest.raises(ValueError, match="kv_len_arr and seq_lens must agree"):
        MLAPlanMetadata.dual(*batch.tables, **dense | {"seq_lens": dense["seq_lens"] + 1})
    with pytest.raises(ValueError, match="kv_indices and block_tables must agree"):
        planned(
            batch, metadata=MLAPlanMetadata.dual(*batch.tables, **dense | {"block_tables": dense["block_tables"] + 1})
        )
    with pytest.raises(ValueError, match="seq_lens must be 0 to"):
        planned(batch, metadata=MLAPlanMetadata.dense(**dense | {"seq_lens": dense["seq_lens"] + 1000}))
    with pytest.raises(ValueError, match="block_tables must be a tensor"):
        MLAPlanMetadata(cum_seq_lens_q=dense["cum_seq_lens_q"])
    assert metadata_of("dual", batch).has_csr and sum(KV_LENS) == int(batch.tables[3].sum())


CALLS = [
    ({"query": "q", "kv_cache": "k", "q_nope": "a"}, TypeError, "not both"),
    ({"q_nope": "a", "kv_cache": "k"}, ValueError, "must both be provided"),
    ({"query": "q"}, TypeError, "kv_cache must be given"),
    ({}, TypeError, "query and kv_cache must be given"),
    ({"query": "pair", "kv_cache": "k"}, ValueError, r"query must be one tensor \('packed', as planned\), got a pair"),
    ({"query": "q", "kv_cache": "k", "return_lse": True}, ValueError, "return_lse must be False"),
    ({"query": "q", "kv_cache": "k", "return_lse_base_on_e": True}, ValueError, "return_lse_base_on_e must be False"),
    ({"query": "q", "kv_cache": "k", "sinks": "a"}, ValueError, "sinks must be None"),
    ({"query": "q", "kv_cache": "k", "bmm1_scale": 1.0}, ValueError, "bmm1_scale and bmm2_scale must be None"),
    ({"query": "q", "kv_cache": "k", "skip_softmax_threshold_scale_factor": 1.0}, ValueError, "skip_softmax_threshold"),
    ({"query": 3, "kv_cache": "k"}, TypeError, "query must be Tensor or a pair"),
    ({"query": "thin", "kv_cache": "k"}, ValueError, "at least 512 columns"),
]


@pytest.mark.parametrize("options, kind, text", CALLS)
def test_refused_calls(batch, options, kind, text):
    q, k = packed(batch).values()
    values = {"q": q, "k": k, "a": batch.q_nope, "pair": (batch.q_nope, batch.q_pe), "thin": q[..., :100]}
    given = {name: values[x] if isinstance(x, str) else x for name, x in options.items()}
    with pytest.raises(kind, match=text):
        planned(batch, metadata=metadata_of("csr", batch)).run(**given)


def test_call_before_plan_and_half_of_a_pair(batch):
    with pytest.raises(RuntimeError, match=r"called before plan\(\)"):
        BatchMLAPagedAttentionWrapper(workspace("cpu")).run(**packed(batch))
    with pytest.raises(ValueError, match="must both be provided"):
        batch.wrapper().run(batch.q_nope, None, *batch.caches)


@pytest.mark.parametrize("tensors", [pairs, packed])
def test_definitions(batch, tensors):
    arguments = tensors(batch)
    definition = BatchMLAPagedAttentionWrapper.run.fi_trace(None, **arguments)
    assert definition["axes"]["page_size"]["value"] == 16 and definition["axes"]["num_qo_heads"]["value"] == HEADS
    template = BatchMLAPagedAttentionWrapper.run._trace_template(**arguments)
    inputs = arguments if "query" in template.inputs else dict(zip(template.inputs, batch.arguments, strict=False))
    rows, begins, pages, lens = batch.tables
    table = {"kv_indptr": begins, "kv_indices": pages, "qo_indptr": rows, "kv_len_arr": lens, "sm_scale": SCALE}
    got = template.reference(**inputs, **table)
    close(got, batch.expected())
