# SPDX-License-Identifier: Apache-2.0
"""Variants as C++ text (docs/attention_variants.md): hooks, parameters, and arguments filled in by wrappers."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.jit import env as jit_env
from flashinfer.jit import (
    gen_customize_batch_prefill_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)
from flashinfer.jit.attention.customize import _TAKEN
from flashinfer.jit.attention.variants import attention_sink_decl

from . import calls
from .inputs import Batch
from .reference import Attention
from .sigmoid import SIGMOID

F16 = torch.float16
HEAD = """
struct {name} : AttentionVariantBase {{
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  {members}
  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    {body}
  }}
"""


def struct(name, hooks, members="", body="sm_scale_log2 = params.sm_scale * math::log2e;"):
    return HEAD.format(name=name, members=members, body=body) + hooks + "};"


PACKED_MASK = struct(
    "PackedMask",
    """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t bit = qo_idx * kv_len + kv_idx;
    return (mask[bit / 8] >> (bit % 8)) & 1;
  })
""",
    members="uint8_t* mask;",
    body="mask = params.bits; sm_scale_log2 = params.sm_scale * math::log2e;",
)
DUMP = struct(
    "Dump",
    """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    params.dump[(qo_head_idx * qo_len + qo_idx) * kv_len + kv_idx] = logits * params.sm_scale;
    return logits;
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    params.scores[qo_idx * params.num_qo_heads + qo_head_idx] = m + math::ptx_log2(d);
    return output * math::ptx_rcp(d);
  })
""",
)
WELL_KNOWN = struct(
    "WellKnown",
    """
  REGISTER_QUERY_TRANSFORM(params, q, { return float(q) * 2.f; })
  REGISTER_KEY_TRANSFORM(params, k, { return float(k) * 0.5f; })
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (params.maybe_alibi_slopes == nullptr) return logits;
    return logits + params.maybe_alibi_slopes[qo_head_idx] * float(int(kv_idx) - int(qo_idx)) / float(params.sm_scale);
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (params.maybe_custom_mask == nullptr) return true;
    const uint32_t bit = qo_idx * kv_len + kv_idx;
    return (params.maybe_custom_mask[params.maybe_mask_indptr[batch_idx] + bit / 8] >> (bit % 8)) & 1;
  })
""",
)


def expected_sigmoid(batch, sm_scale, bias):
    results = []
    keys = zip(batch.kv_indptr_host, batch.kv_indptr_host[1:], strict=False)
    rows = zip(batch.qo_indptr_host, batch.qo_indptr_host[1:], strict=False)
    for (a, b), (c, d) in zip(rows, keys, strict=True):
        group = batch.num_qo_heads // batch.num_kv_heads
        k, v = (x[c:d].float().repeat_interleave(group, dim=1) for x in (batch.k, batch.v))
        weights = torch.sigmoid(torch.einsum("qhd,khd->hqk", batch.q[a:b].float(), k) * sm_scale + bias)
        results.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(results)


def describe(tensors, scalars, name, text):
    """Return the lists, name and text that end the arguments of each generator. Scalars are double."""
    return ([*tensors], [*tensors.values()], [*scalars], ["double"] * len(scalars), name, text)


def test_a_mask_of_ones_own_when_decoding(device):
    variant = describe({"bits": "uint8_t"}, ["sm_scale"], "PackedMask", PACKED_MASK)
    spec = gen_customize_single_decode_module("test_packed_mask", F16, F16, F16, 64, 64, *variant, device=device)
    batch = Batch([1], [333], device=device)
    mask = torch.rand(1, 333, device=device) < 0.5
    bits = flashinfer.packbits(mask.view(-1), bitorder="little")
    o = flashinfer.decode.single_decode_with_kv_cache_with_jit_module(
        spec.build_and_load(), batch.q[0], batch.k, batch.v, bits, 0.2
    )
    expected, _ = Attention(mask=mask, sm_scale=0.2)(batch.q, batch.k, batch.v)
    torch.testing.assert_close(o.float(), expected[0], rtol=2e-3, atol=2e-3)


def close_to_sigmoid(o: torch.Tensor, batch: Batch) -> None:
    torch.testing.assert_close(o.float(), expected_sigmoid(batch, 0.2, -6.0), rtol=1e-2, atol=1e-2)


SIGMOID_VARIANT = describe({}, ["factor", "bias"], "Sigmoid", SIGMOID)


@pytest.mark.full  # the kernels below for one request; test_jit_wrappers.py calls modules of single requests
def test_sigmoid_of_single_requests(device):
    key = (F16, F16, F16, 64, 64, *SIGMOID_VARIANT)
    batch = Batch([1], [4000], device=device)
    module = gen_customize_single_decode_module("test_sigmoid_decode", *key, device=device)
    o = flashinfer.decode.single_decode_with_kv_cache_with_jit_module(
        module.build_and_load(), batch.q[0], batch.k, batch.v, 0.2, -6.0
    )
    close_to_sigmoid(o[None], batch)
    batch = Batch([40], [70], device=device)
    module = gen_customize_single_prefill_module("fa2", "test_sigmoid", *key, device=device)
    run = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    close_to_sigmoid(run(module.build_and_load(), batch.q, batch.k, batch.v, 0.2, -6.0), batch)


def test_sigmoid_instead_of_softmax(device):
    """Check weights without a denominator, also with split-KV: batches, decode and prefill."""
    close = close_to_sigmoid
    batch = Batch([1, 1], [2000, 9], device=device)
    pages = batch.pages(16)
    arguments = ("test_sigmoid_batch_decode", F16, F16, F16, torch.int32, 64, 64, *SIGMOID_VARIANT)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(calls.workspace(device), jit_args=arguments)
    wrapper.plan(*pages.table, *batch.heads, 64, 16, q_data_type=F16)
    close(wrapper.run(batch.q, batch.cache(pages), 0.2, -6.0), batch)

    batch = Batch([1, 40, 3], [2000, 70, 9], device=device)
    pages = batch.pages(16)
    options = {"backend": "fa2", "jit_args": ("test_sigmoid_batch", *arguments[1:])}
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device), **options)
    paged.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 16, q_data_type=F16)
    close(paged.run(batch.q, batch.cache(pages), 0.2, -6.0), batch)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(calls.workspace(device), **options)
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, q_data_type=F16)
    close(ragged.run(batch.q, batch.k, batch.v, 0.2, -6.0), batch)


@pytest.mark.parametrize("qo_len, kv_len", [(1, 100), (3, 250), (11, 256), (70, 200), (129, 65), (2, 3000)])
def test_logits_can_be_written_down(device, qo_len, kv_len):
    """Check that hooks run only for existing queries and keys, and that each pair has its own indices."""
    variant = describe({"dump": "float", "scores": "float"}, ["sm_scale"], "Dump", DUMP)
    spec = gen_customize_single_prefill_module("fa2", "test_dump", F16, F16, F16, 64, 64, *variant, device=device)
    batch = Batch([qo_len], [kv_len], device=device)
    dump = torch.full((5, qo_len, kv_len), torch.nan, device=device)
    scores = torch.full((qo_len + 1, 4), torch.nan, device=device)
    o, lse = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module(
        spec.build_and_load(), batch.q, batch.k, batch.v, dump, scores, 0.125, return_lse=True
    )
    calls.check((o, lse), batch.expected(), F16)
    logits = torch.einsum("qhd,khd->hqk", batch.q.float(), batch.k.float().repeat_interleave(2, 1)) * 0.125
    torch.testing.assert_close(dump[:4], logits, rtol=1e-3, atol=1e-3)
    assert dump[4].isnan().all() and scores[-1].isnan().all()
    if kv_len <= 256:  # with split-KV each split has its own score
        torch.testing.assert_close(scores[:-1], lse, rtol=1e-3, atol=1e-3)


def test_what_wrappers_fill_in(device):
    """Check masks and slopes that come from plan, hooks on q and k, and the caller's own scalar."""
    tensors = {"maybe_custom_mask": "uint8_t", "maybe_mask_indptr": "int32_t", "maybe_alibi_slopes": "float"}
    variant = describe(tensors, ["sm_scale"], "WellKnown", WELL_KNOWN)
    arguments = ("test_well_known", F16, F16, F16, torch.int32, 64, 64, *variant)
    batch = Batch([1, 40, 3], [200, 70, 9], device=device)
    pages = batch.pages(16)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device), backend="fa2", jit_args=arguments)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(calls.workspace(device), backend="fa2", jit_args=arguments)
    shapes = zip(batch.qo_lens, batch.kv_lens, strict=True)
    what = [Attention(alibi=True, mask=torch.rand(a, b, device=device) < 0.5) for a, b in shapes]
    options = {"pos_encoding_mode": "ALIBI", "custom_mask": calls.masks(what), "q_data_type": F16}
    paged.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 16, **options)
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, **options)
    calls.check(paged.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(what), F16)  # derived sm_scale
    calls.check(ragged.run(batch.q, batch.k, batch.v, 0.125, return_lse=True), batch.expected(what), F16)


def test_sinks_with_ragged_keys(device):
    """Check a denominator with an initial value, added once per row however the keys are split."""
    variant = describe({"sink": "float"}, ["sm_scale"], "AttentionSink", attention_sink_decl["fa2"])
    uri = "batch_prefill_attention_sink_q_f16_kv_f16_head_dim_qk_64_head_dim_vo_64_posenc_0"  # module for sinks
    arguments = (uri, F16, F16, F16, torch.int32, 64, 64, *variant)
    batch = Batch([1, 40, 3], [4000, 70, 9], device=device)
    what = Attention(causal=True, sinks=torch.randn(4, device=device) * 3)
    for split in ({}, {"fixed_split_size": 64}, {"disable_split_kv": True}):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(calls.workspace(device), jit_args=arguments)
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, causal=True, q_data_type=F16, **split)
        got = wrapper.run(batch.q, batch.k, batch.v, what.sinks, 0.125, return_lse=True)
        calls.check(got, batch.expected(what), F16)


@pytest.mark.parametrize("backend, error", [("auto", ValueError), ("fa9", ValueError)])
def test_bad_backends(backend, error):
    variant = describe({}, ["sm_scale"], "AttentionSink", attention_sink_decl["fa2"])
    with pytest.raises(error, match="backend"):
        gen_customize_batch_prefill_module(backend, "x", F16, F16, F16, torch.int32, 64, 64, *variant)


def test_bad_declarations(device):
    text = attention_sink_decl["fa2"]
    with pytest.raises(ValueError, match=r"additional_tensor_dtypes must have 1 entries .*, got 0"):
        gen_customize_single_decode_module("x", F16, F16, F16, 64, 64, ["sink"], [], [], [], "AttentionSink", text)
    with pytest.raises(ValueError, match="maybe_k_cache_sf and maybe_v_cache_sf"):
        variant = describe({"sink": "float"}, ["sm_scale"], "AttentionSink", text)
        gen_customize_single_prefill_module("fa2", "x", F16, torch.uint8, F16, 64, 64, *variant, device=device)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        (
            {"tensors": (["window_left"], ["float"])},
            ValueError,
            "additional_.*_names must not have names that kernels use, got 'window_left'",
        ),
        (
            {"scalars": (["out_scale"], ["float"])},
            ValueError,
            "additional_scalar_names must not have names that kernels use, got 'out_scale'",
        ),
        ({"scalars": (["sink"], ["float"])}, ValueError, "must have different names, got 'sink' twice"),
        ({"tensors": ("sink", "float")}, TypeError, "additional_tensor_dtypes must be lists of str, got str"),
        ({"tensors": (["sink"], [torch.float32])}, TypeError, "must be C.. types, got torch.float32 for sink"),
        ({"tensors": ([3], ["float"])}, ValueError, "additional_tensor_names must be names of variables, got 3"),
        ({"text": None}, TypeError, "gen_customize_single_decode_module: variant_decl must be text, got a NoneType"),
        ({"uri": 3}, TypeError, "uri must be text, got a int"),
        ({"pos_encoding_mode": "NONE"}, ValueError, "pos_encoding_mode must be a value of"),
    ],
)
def test_declarations_that_kernels_would_stumble_over(changes, error, text):
    given = {"tensors": (["sink"], ["float"]), "scalars": ([], []), "text": attention_sink_decl["fa2"], "uri": "x"}
    given = given | {"pos_encoding_mode": 0} | changes
    with pytest.raises(error, match=text):
        gen_customize_single_decode_module(
            given["uri"], F16, F16, F16, 64, 64, *given["tensors"], *given["scalars"], "AttentionSink", given["text"],
            given["pos_encoding_mode"], device="cpu",
        )  # fmt: skip


def test_names_that_kernels_have_are_those_of_the_header():
    text = (jit_env.FLASHINFER_INCLUDE_DIR / "flashinfer/attention/common/params.h").read_text()
    struct = text[text.index("struct AttentionParams {") : text.index("FLASHINFER_HD uint32_t get_qo_len")]
    lines = [line.split("//")[0].strip() for line in struct.splitlines()]
    declared = [line.rstrip(";") for line in lines if line.endswith(";") and not line.startswith(("using", "static"))]
    members = {name.split()[-1].lstrip("*") for line in declared for name in line.split(",")}
    assert "window_left" in members and members | {"get_qo_len", "get_kv_len"} == _TAKEN


def test_scores_of_the_reference_sigmoid_are_right():
    batch = Batch([1], [1])
    weight = torch.sigmoid((batch.q.float() * batch.k.float().repeat_interleave(2, 1)).sum(-1) - math.pi)
    expected = weight[..., None] * batch.v.float().repeat_interleave(2, 1)
    torch.testing.assert_close(expected_sigmoid(batch, 1.0, -math.pi), expected)
