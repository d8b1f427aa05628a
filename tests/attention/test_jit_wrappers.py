# SPDX-License-Identifier: Apache-2.0
"""Wrappers and single requests with user-defined variants: the source of each parameter."""

from __future__ import annotations

import types

import pytest
import torch

import flashinfer
from flashinfer.attention.jit_arguments import JitArguments
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache_with_jit_module
from flashinfer.jit.attention import gen_customize_single_decode_module, gen_customize_single_prefill_module
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache_with_jit_module,
)

from ..tensors import view_of_wider
from .inputs import Batch
from .reference import Attention
from .wrappers import F16, close, workspace

# The variant multiplies logits by a number per head, and its mask hides keys whose index is a multiple of `stride`.
DECL = r"""
struct Gain : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ Gain(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return params.gain[qo_head_idx] * logits;
  });

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return params.stride == 0 || kv_idx % params.stride != 0;
  })
};
"""
TENSORS, SCALARS = (["gain"], ["float"]), (["stride", "sm_scale"], ["int64_t", "double"])
VARIANT = (*TENSORS, *SCALARS, "Gain", DECL)
NARROW_VARIANT = (*TENSORS, SCALARS[0], ["int32_t", "double"], "Gain", DECL)


def arguments(uri: str) -> tuple:
    return (uri, F16, F16, F16, torch.int32, 64, 64, *VARIANT)


def expected_of(batch: Batch, gain: torch.Tensor, stride: int):
    scaled = batch.q
    batch.q = (batch.q.float() * gain[:, None]).to(torch.float64)
    masks = [(torch.arange(k) % stride != 0).expand(q, k) for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    result = batch.expected([Attention(mask=mask) for mask in masks])
    batch.q = scaled
    return result


def test_decode_wrapper_takes_parameters_in_order(device):
    batch = Batch([1, 1], [40, 97], device=device)
    pages = batch.pages(8)
    gain = torch.rand(4, device=device) + 0.5
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=arguments("test_gain_decode"))
    wrapper.plan(*pages.table, *batch.heads, 64, 8)
    got = wrapper.run(batch.q, batch.cache(pages), gain, 3, 0.125, return_lse=True)
    close(got, expected_of(batch, gain, 3), 5e-3)
    derived = wrapper.run(batch.q, batch.cache(pages), gain, 3)
    assert torch.equal(derived, got[0])
    with pytest.raises(ValueError, match="'stride' must be among the positional arguments"):
        wrapper.run(batch.q, batch.cache(pages), gain)


def test_prefill_wrappers_with_a_mask_of_the_variant(device):
    batch = Batch([9, 30], [40, 97], device=device)
    pages = batch.pages(8)
    gain = torch.rand(4, device=device) + 0.5
    expected = expected_of(batch, gain, 3)
    options = {"jit_args": arguments("test_gain_prefill"), "variant_owns_mask": True}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), **options)
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8)
    close(wrapper.run(batch.q, batch.cache(pages), gain, 3, return_lse=True), expected, 5e-3)
    with pytest.raises(RuntimeError):
        wrapper.prewarm_paged_kv_stride_variant()
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), **options)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64)
    close(wrapper.run(batch.q, *batch.dense(), gain, 3, 0.125, return_lse=True), expected, 5e-3)

    def step(q, k, v):
        return wrapper.run(q, k, v, gain, 3, 0.125)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch.q, *batch.dense()), step(batch.q, *batch.dense()))


def single_decode_module(device):
    """Build the variant for one request, with a number of 32 bits among its parameters."""
    key = ("test_gain_single", F16, F16, F16, 64, 64, *NARROW_VARIANT)
    return gen_customize_single_decode_module(*key, device=device).build_and_load()


def test_single_requests(device):
    gain = torch.rand(4, device=device) + 0.5
    dtypes = (F16, F16, F16, 64, 64)
    decode = single_decode_module(device)
    batch = Batch([1], [97], device=device)
    k, v = batch.dense("HND")
    out = single_decode_with_kv_cache_with_jit_module(decode, batch.q[0], k, v, gain, 3, 0.125, kv_layout="HND")
    expected = expected_of(batch, gain, 3)
    close((out[None], expected[1]), expected, 5e-3)
    module = gen_customize_single_prefill_module(
        "fa2", "test_gain_single_prefill", *dtypes, *VARIANT, device=device
    ).build_and_load()
    batch = Batch([20], [97], device=device)
    extras = {"mask_mode": flashinfer.utils.MaskMode.CUSTOM.value, "return_lse": True}
    got = single_prefill_with_kv_cache_with_jit_module(module, batch.q, *batch.dense(), gain, 3, 0.125, **extras)
    close(got, expected_of(batch, gain, 3), 5e-3)
    k, v = (view_of_wider(x) for x in batch.dense())  # rows whose starts are not aligned for kernels
    again = single_prefill_with_kv_cache_with_jit_module(module, batch.q, k, v, gain, 3, 0.125, **extras)
    assert all(torch.equal(*pair) for pair in zip(again, got, strict=True))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k, v, gain):
        last = single_decode_with_kv_cache_with_jit_module(decode, q[0] * 1, k, v, gain, 3, 0.125)
        o, lse = single_prefill_with_kv_cache_with_jit_module(module, q * 1, k, v, gain, 3, 0.125, **extras)
        return o * 2, lse + 1, last

    o, lse, last = model(batch.q, *batch.dense(), gain)
    assert torch.equal(o, got[0] * 2) and torch.equal(lse, got[1] + 1)
    dense = batch.dense()
    assert torch.equal(last, single_decode_with_kv_cache_with_jit_module(decode, batch.q[0], *dense, gain, 3, 0.125))
    stranger = types.SimpleNamespace(run=module.run)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def other(q, k, v, gain):
        return single_decode_with_kv_cache_with_jit_module(stranger, q[0] * 1, k, v, gain, 3, 0.125)

    with pytest.raises(
        ValueError, match=r"run_jit_module: jit_module must be what build_and_load\(\) returned, got one unknown"
    ):
        other(batch.q, *dense, gain)


def test_numbers_and_tensors_of_another_kind_than_declared(device):
    batch = Batch([1, 1], [40, 97], device=device)
    pages, gain = batch.pages(8), torch.ones(4, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=arguments("test_gain_decode"))
    wrapper.plan(*pages.table, *batch.heads, 64, 8)
    cache, op = batch.cache(pages), r"BatchDecodeWithPagedKVCacheWrapper\.run"
    assert torch.equal(wrapper.run(batch.q, cache, gain, 3.0), wrapper.run(batch.q, cache, gain, 3))
    for given, error, text in (
        ((gain, 2.5), TypeError, rf"{op}: stride must be an integer \(int64_t\).*, got 2\.5"),
        ((gain, float("inf")), TypeError, rf"{op}: stride must be an integer.*, got inf"),
        ((gain, 1 << 63), ValueError, rf"{op}: stride must fit 64 bits, got {1 << 63}"),
        ((gain.int(), 3), TypeError, rf"{op}: gain must be float \(as declared\).*, got torch\.int32"),
    ):
        with pytest.raises(error, match=text):
            wrapper.run(batch.q, cache, *given)
    narrow = JitArguments(("uri", *[0] * 6, ["x"], ["int32_t"], ["n", "b"], ["uint32_t", "bool"]), ())
    assert narrow.typed([7.0, 1.0]) == [7, 1] and isinstance(narrow.typed([7.0, 1.0])[1], int)
    assert narrow.split("op", (None, -1, True), {}) == ([None], [-1, True])
    with pytest.raises(ValueError, match=rf"op\.run: n must fit 32 bits, got {1 << 32}"):
        narrow.split("op", (None, 1 << 32, True), {})
    with pytest.raises(TypeError, match=r"op\.run: x must be int32_t \(as declared\).*, got torch\.float32"):
        narrow.split("op", (gain, 1, True), {})


def test_known_tensors_do_not_consume_arguments():
    names = ["maybe_custom_mask", "sink", "maybe_alibi_slopes", "maybe_other"]
    jit = JitArguments(
        ("uri", *[0] * 6, names, ["float"] * 4, ["n", "sm_scale"], ["int32_t", "double"]),
        ["maybe_custom_mask", "maybe_alibi_slopes"],
    )
    sink = torch.zeros(2)
    tensors, scalars = jit.split("run", (sink, 7), {"sm_scale": 0.5})
    assert tensors == [sink, None] and scalars == [7, 0.5]
    every = jit.all_tensors(tensors, {"maybe_custom_mask": None, "maybe_alibi_slopes": sink})
    assert every == [None, sink, sink, None]
    assert jit.typed([7.0, 0.5]) == [7, 0.5] and isinstance(jit.typed([7.0, 0.5])[0], int)
    known = {"maybe_custom_mask": None, "maybe_alibi_slopes": sink}
    assert flashinfer.utils.prepare_jit_additional_args(names, known, (sink,)) == [None, sink, sink, None]
    assert flashinfer.utils.prepare_jit_additional_args(names[:2], known, (sink, 7, 0.5)) == [None, sink, 7, 0.5]
    with pytest.raises(ValueError, match="'n' must be among the positional arguments"):
        jit.split("Wrapper", (sink,), {"sm_scale": 0.5})
    with pytest.raises(TypeError, match=r"Wrapper\.run: sm_scale must be a number.*, got a Tensor"):
        jit.split("Wrapper", (sink, None, 7, sink), {})
    with pytest.raises(TypeError, match=r"positional arguments after the tensors must be at most 2 \(n, .*, got 3"):
        jit.split("Wrapper", (sink, None, 7, 0.5, 1.0), {})


def test_parameters_of_other_types(device):
    """Check that parameters of other types and values out of range are rejected: kernels read raw bits."""
    module = single_decode_module(device)
    batch = Batch([1], [97], device=device)
    gain = torch.ones(4, device=device)

    def call(gain, stride):
        return single_decode_with_kv_cache_with_jit_module(module, batch.q[0], *batch.dense(), gain, stride, 0.125)

    for dtype in (torch.int32, torch.float64, torch.float16):
        with pytest.raises(ValueError, match=rf"gain must have the dtype .* declares \(float\), got {str(dtype)[6:]}$"):
            call(gain.to(dtype), 3)
    for stride in (2**40, -(2**31) - 1):
        with pytest.raises(ValueError, match=rf"stride must have the type .* declares \(int32_t\), got {stride}$"):
            call(gain, stride)


def test_what_is_none_of_the_arguments(device):
    for bad in ([], ["uri"], arguments("uri")[:10]):
        with pytest.raises(ValueError, match=rf"jit_args must have 13 elements.*, got {len(bad)}"):
            BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=bad)
    for call in (single_decode_with_kv_cache_with_jit_module, single_prefill_with_kv_cache_with_jit_module):
        with pytest.raises(TypeError, match=rf"{call.__name__}: q must be Tensor.*, got a NoneType"):
            call(None, None, None, None)
