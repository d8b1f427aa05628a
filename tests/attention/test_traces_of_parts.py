# SPDX-License-Identifier: Apache-2.0
"""Trace definitions of calls that join several parts (POD, cascade) and of older calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.fi_trace import fi_trace

from ..cascade import tree as cascade
from ..mla.latent import CKV, F16, HEADS, SCALE, Latent
from ..pod.inputs import decode_part
from .definitions import run_definition, run_reference
from .inputs import LAYOUTS, Batch, int32, to_layout
from .prompts import FP8, KV_LENS, PAGE, QO_LENS, contiguous, prefill, workspace
from .reference import alibi_slopes

PAIR = pytest.mark.parametrize("pair", [False, True])
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
TABLE = ("kv_indptr", "kv_indices", "kv_last_page_len")


def halves(cache: torch.Tensor, part: str = "") -> dict[str, torch.Tensor]:
    return dict(zip((f"k_cache{part}", f"v_cache{part}"), cache.unbind(1), strict=True))


def form(cache: torch.Tensor, pair: bool) -> Any:
    return tuple(cache.unbind(1)) if pair else cache


def close(actual: Any, expected: Any, tolerance: float = 2e-3) -> None:
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a.float(), e.float(), rtol=tolerance, atol=tolerance)


@LAYOUT
@PAIR
def test_pod(layout, pair):
    prompt, layout_p = Batch([40], [97]), "HND" if layout == "NHD" else "NHD"
    batch, pages, cache = decode_part("cpu", layout)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu"), layout)
    wrapper.plan(*pages.table, *batch.heads, 64, 8, sm_scale=0.3)
    k, v = prompt.dense(layout_p)
    call = {"q_p": prompt.q, "k_p": k, "v_p": v, "q_d": batch.q, "paged_kv_cache_d": form(cache, pair)}
    call |= {"causal_p": True, "sm_scale_p": 0.2, "window_left_p": 30, "kv_layout_p": layout_p}
    made = fi_trace(wrapper.run, **call)
    suffix = "_pair" if pair else ""
    assert made["name"] == f"pod_{layout_p.lower()}_paged_{layout.lower()}{suffix}_h4_kv2_d64_dv64_ps8"
    tables = dict(zip(TABLE, pages.table, strict=True))
    close(wrapper.run(**call), run_definition(made, {**call, **halves(cache, "_d"), **tables, "sm_scale": 0.3}))


@LAYOUT
@PAIR
def test_batch_pod(layout, pair):
    prompts, (batch, pages, cache) = Batch([17, 40], [33, 97]), decode_part("cpu", layout)
    prompt_pages = prompts.pages(8)
    prompt_cache = prompts.cache(prompt_pages, layout, "combined")
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"), layout)
    tables = (prompts.qo_indptr, *prompt_pages.table, batch.qo_indptr, *pages.table)
    wrapper.plan(*tables, *batch.heads, 64, 8, sm_scale=0.3)
    call = {"q_p": prompts.q, "paged_kv_cache_p": form(prompt_cache, pair), "causal_p": True}
    call |= {"q_d": batch.q, "paged_kv_cache_d": form(cache, pair)}
    made = fi_trace(wrapper.run, **call)
    names = [f"{name}{part}" for part in ("_p", "_d") for name in ("qo_indptr", *TABLE)]
    inputs = {**call, **halves(prompt_cache, "_p"), **halves(cache, "_d"), **dict(zip(names, tables, strict=True))}
    close(wrapper.run(**call), run_definition(made, {**inputs, "sm_scale": 0.3}))
    with pytest.raises(ArgumentError, match="both caches must have the same form"):
        fi_trace(wrapper.run, **(call | {"paged_kv_cache_d": form(cache, not pair)}))


@PAIR
def test_published_pod(pair):
    """Check prompts with as many keys as queries in the layout NHD, whose definitions are published."""
    prompt, (batch, pages, cache) = Batch([40], [40]), decode_part("cpu", "NHD")
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu"), "NHD")
    wrapper.plan(*pages.table, *batch.heads, 64, 8)
    call = {"q_p": prompt.q, "k_p": prompt.k, "v_p": prompt.v, "q_d": batch.q, "paged_kv_cache_d": form(cache, pair)}
    call |= {"causal_p": True}
    made = fi_trace(wrapper.run, **call)
    assert made["name"] == "pod_run_h4_kv2_d64_ps8"
    tables = dict(zip(TABLE, pages.table, strict=True))
    close(wrapper.run(**call), run_reference(wrapper.run, made, {**call, **tables}))
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"), "NHD")
    wrapper.plan(batch.qo_indptr, *pages.table, batch.qo_indptr, *pages.table, *batch.heads, 64, 8)
    call = {"q_p": batch.q, "q_d": batch.q}
    call |= {f"paged_kv_cache_{part}": form(cache, pair) for part in "pd"}
    made = fi_trace(wrapper.run, **call)
    assert made["name"] == "batch_pod_run_h4_kv2_d64_ps8"
    rows = {**tables, "qo_indptr": batch.qo_indptr}
    tables = {f"{name}_{part}": x for part in "pd" for name, x in rows.items()}
    close(wrapper.run(**call), run_reference(wrapper.run, made, {**call, **tables}))


@LAYOUT
@PAIR
@pytest.mark.parametrize(
    "levels, rows",
    [([[40], [5, 1, 0, 17]], [[4], [1] * 4]), ([[40], [9, 3], [20, 7, 9]], [[30], [20, 10], [20, 3, 7]])],
    ids=["decode", "three levels"],
)
def test_levels(layout, pair, levels, rows):
    tree = cascade.Tree("cpu", layout, levels, rows)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), workspace("cpu"), layout)
    kv_indptr, kv_indices, last = tree.tables()
    kv_indices = [x[: indptr[-1]] for x, indptr in zip(kv_indices, kv_indptr, strict=True)]
    arrays = (tree.qo_indptr, kv_indptr, kv_indices, last)
    wrapper.plan(*arrays, cascade.HEADS, cascade.KV_HEADS, cascade.DIM, cascade.PAGE, causal=True, sm_scale=0.2)
    call = {"q": tree.q, "paged_kv_cache": form(tree.cache, pair)}
    made = fi_trace(wrapper.run, **call)
    if layout == "NHD":
        heads = f"h{cascade.HEADS}_kv{cascade.KV_HEADS}_d{cascade.DIM}_ps{cascade.PAGE}"
        assert made["name"] == f"multi_level_cascade_run_{heads}"
    else:
        assert made["axes"]["num_levels"] == {"type": "var"}
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    tables = {name: torch.cat(array) for name, array in zip(names, arrays, strict=True)}
    tables["level_sizes"] = int32([len(level) for level in levels], "cpu")
    inputs = {**call, **halves(tree.cache), **tables, "causal": True, "sm_scale": 0.2}
    run = run_definition if layout == "HND" else partial(run_reference, wrapper.run)
    close(wrapper.run(**call), run(made, inputs))


@LAYOUT
@PAIR
def test_shared_prefix(layout, pair):
    for name, rows, own in (("Decode", [1] * 4, [5, 1, 0, 17]), ("Prefill", [20, 3, 7], [20, 7, 9])):
        tree = cascade.Tree("cpu", layout, [[cascade.SHARED], own], [[sum(rows)], rows])
        wrapper = getattr(flashinfer, f"Batch{name}WithSharedPrefixPagedKVCacheWrapper")(workspace("cpu"), layout)
        table = [x[1] for x in tree.tables()]
        planned = table if name == "Decode" else [tree.qo_indptr[1], *table]
        wrapper.begin_forward(*planned, cascade.HEADS, cascade.KV_HEADS, cascade.DIM, cascade.PAGE)
        k, v = (to_layout(x[: cascade.SHARED], layout) for x in (tree.k, tree.v))
        call = {"q": tree.q, "k_shared": k, "v_shared": v, "unique_kv_cache": form(tree.cache, pair)}
        call |= {} if name == "Decode" else {"causal": True, "sm_scale": 0.2}
        made = fi_trace(wrapper.forward, **call)
        assert made["name"].startswith(f"shared_prefix_{name.lower()}_{layout.lower()}")
        tables = {"qo_indptr": tree.qo_indptr[1], **dict(zip(TABLE, table, strict=True))}
        close(wrapper.forward(**call), run_definition(made, {**call, **halves(tree.cache), **tables}))


def test_latent_decode():
    batch = Latent("cpu", 16, [1] * 3, [33, 97, 0])
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.pages.table, HEADS, CKV, 16, SCALE, data_type=F16)
    call = dict(zip(("q_nope", "q_pe", "paged_ckv_cache", "paged_kpe_cache"), batch.arguments, strict=True))
    made = fi_trace(wrapper.run, **call)
    assert made["name"] == "mla_decode_paged_h16_ckv512_kpe64_ps16"
    tables = dict(zip(TABLE, batch.pages.table, strict=True))
    close(wrapper.run(**call), run_definition(made, {**call, **tables, "sm_scale": SCALE}))


# ---------------------------------------------------------------------------------------------- trtllm_fmha_v2_prefill


class Prompts:
    """A call in one layout, its definition, and the inputs of its reference."""

    def __init__(self, layout: str) -> None:
        self.layout, self.options = layout, {}
        self.batch = Batch(QO_LENS, QO_LENS if layout == "PACKED_QKV" else KV_LENS, 4, 4 if "PACKED" in layout else 2)
        b = self.batch
        self.qkv: Any = contiguous(b)
        self.names: tuple[str, ...] = ("q", "kv")
        if layout == "PACKED_QKV":
            self.qkv, self.names = torch.stack([b.q, b.k, b.v], dim=1), ("qkv",)
        elif layout == "SEPARATE_Q_K_V":
            self.qkv, self.names = (b.q, b.k, b.v), ("q", "k", "v")
        elif layout.startswith("Q_PAGED"):
            pages = b.pages(PAGE)
            self.qkv, self.names = (b.q, b.cache(pages, layout[-3:], "combined")), ("q", "kv_cache")
            self.options["block_tables"] = pages.block_tables()

    def definition(self, **options: Any) -> dict[str, Any]:
        b = self.batch
        lens = {"seq_lens": int32(b.kv_lens, "cpu"), "cum_seq_lens_q": b.qo_indptr, "cum_seq_lens_kv": b.kv_indptr}
        self.inputs = {**lens, "bmm1_scale": 0.2, "bmm2_scale": 2.0, **self.options}
        call = {"qkv": self.qkv, "input_layout": self.layout, **self.inputs, **options}
        return flashinfer.trtllm_fmha_v2_prefill.fi_trace(**call)

    def check(self, effective: dict[str, Any], tolerance: float = 2e-3, **options: Any) -> dict[str, Any]:
        """Compare the call with its reference. ``effective``: the options under the names that the definition uses."""
        made = self.definition(**options)
        tensors = self.qkv if isinstance(self.qkv, tuple) else (self.qkv,)
        defaults = {"sinks": None, "logits_soft_cap_scale": None, "window_left": -1, "chunked_attention_size": 0}
        defaults |= {"causal": True, "alibi_slopes": None}
        inputs = {**dict(zip(self.names, tensors, strict=True)), **self.inputs, **defaults, **effective}
        out = prefill(self.batch, self.qkv, self.layout, 0.2, 2.0, **self.options, **options)
        close(out, run_definition(made, inputs), tolerance)
        return made


@pytest.mark.parametrize(
    "layout", ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]
)
def test_prompts(layout):
    made = Prompts(layout).check({})
    assert made["op_type"] == "fmha_v2" and ("block_tables" in made["inputs"]) == layout.startswith("Q_PAGED")
    Prompts(layout).check({"causal": False}, mask_mode="padding")


def test_masks_of_prompts():
    prompts, sinks = Prompts("CONTIGUOUS_Q_KV"), torch.tensor([1.0, -2.0, 3.0, 0.5])
    prompts.check({"window_left": 7}, mask_mode="sliding_window", window_left=7)
    chunks = {"chunked_attention_size": 16, "sinks": sinks}
    prompts.check(chunks, mask_mode="chunked", **chunks)
    prompts.check({"logits_soft_cap_scale": 2.0}, logits_soft_cap_scale=2.0)
    prompts.check({"alibi_slopes": alibi_slopes(4).float()}, pos_encoding_mode="alibi")


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0, 3.0, 0.5])])
def test_statistics_of_prompts(cap, sinks):
    options = {"logits_soft_cap_scale": cap, "sinks": sinks}
    made = Prompts("CONTIGUOUS_Q_KV").check(options, save_softmax_stats=True, **options)
    assert list(made["outputs"]) == ["output", "stats"]


def test_output_of_8_bit_prompts():
    prompts = Prompts("CONTIGUOUS_Q_KV")
    prompts.qkv = tuple(x.to(FP8) for x in prompts.qkv)
    assert prompts.definition()["outputs"]["output"]["dtype"] == "float8_e4m3fn"
    assert prompts.check({}, 4e-2, out_dtype=torch.bfloat16)["outputs"]["output"]["dtype"] == "bfloat16"
    out = torch.empty(prompts.batch.q.shape, dtype=torch.float16)
    assert prompts.definition(out=out)["outputs"]["output"]["dtype"] == "float16"


def test_prompts_that_have_no_definition():
    prompts = Prompts("Q_PAGED_KV_NHD")
    q, cache = prompts.qkv
    prompts.qkv = (q, tuple(cache.unbind(1)))
    with pytest.raises(ArgumentError, match="the cache must be one tensor"):
        prompts.definition()
    prompts.layout = "QKV"
    with pytest.raises(ArgumentError, match="input_layout must be one of PACKED_QKV"):
        prompts.definition()
