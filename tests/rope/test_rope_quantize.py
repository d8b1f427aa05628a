# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding with fp8 output, alone and with the append to a paged cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer._runtime.errors import LibraryError
from flashinfer.rope import mla_rope_quantize_fp8, rope_quantize_fp8, rope_quantize_fp8_append_paged_kv_cache
from flashinfer.testing import assert_close
from flashinfer.trace.templates.rope_quantize import (
    rope_quantize_append_reference as append_reference,
)
from flashinfer.trace.templates.rope_quantize import (
    rope_quantize_fp8_trace,
)

from ..tensors import randn
from .inputs import DTYPES, FP8, quantize_inputs

reference = rope_quantize_fp8_trace.reference
on_any_fp8 = pytest.mark.parametrize("fp8", FP8, ids=str)
SCALES = {"quant_scale_q": 0.7, "quant_scale_kv": 1.3}
# heads, key heads (0: MLA), rope_dim, nope_dim: DeepSeek, Llama with and without a rest, a width no vector divides
MODELS = [(128, 0, 64, 512), (8, 2, 64, 64), (8, 8, 128, 0), (4, 2, 32, 96), (3, 1, 6, 7), (2, 0, 18, 24)]


def same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other)


@on_any_fp8
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_quantize(device, model, dtype, is_neox, fp8):
    inputs = quantize_inputs(7, *model, dtype, device)
    expected = reference(**inputs, is_neox=is_neox, **SCALES, q_rope_out_dtype=fp8)
    same(rope_quantize_fp8(**inputs, is_neox=is_neox, **SCALES, quantize_dtype=fp8), expected)


@pytest.mark.parametrize("nnz", [0, 1, 300])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
def test_tokens_and_positions(device, nnz, positions):
    inputs = quantize_inputs(nnz, 16, 0, 64, 128, torch.bfloat16, device)
    inputs["pos_ids"] = inputs["pos_ids"].to(positions)
    same(mla_rope_quantize_fp8(**inputs), reference(**inputs))


def test_parts_that_are_missing(device):
    inputs = quantize_inputs(3, 4, 2, 64, 0, torch.float16, device)
    outputs = rope_quantize_fp8(**inputs)
    assert [tuple(out.shape) for out in outputs] == [(3, 4, 64), (3, 2, 64), (3, 4, 0), (3, 2, 0)]
    only_k = {**inputs, "k_nope": randn(3, 2, 16, dtype=torch.float16, device=device)}
    same(rope_quantize_fp8(**only_k), reference(**only_k))


@on_any_fp8
def test_saturates(device, fp8):
    inputs = quantize_inputs(2, 2, 1, 32, 32, torch.float32, device)
    for out in rope_quantize_fp8(**inputs, quantize_dtype=fp8, quant_scale_q=1e6, quant_scale_kv=1e6):
        assert out.float().isfinite().all()
        assert out.float().abs().max() == torch.finfo(fp8).max


@on_any_fp8
@pytest.mark.parametrize("pad", [0, 3, 16])
def test_outputs_are_slices_of_wider_buffers(device, fp8, pad):
    """Check q_rope and q_nope side by side in one buffer; its dtype selects the format, and gaps stay unchanged."""
    inputs = quantize_inputs(5, 4, 0, 64, 128, torch.bfloat16, device)
    q_out = torch.full((5, 4, 128 + 64 + pad), 7.0, device=device).to(fp8)
    k_out = torch.full((5, 128 + 64 + pad), 7.0, device=device).to(fp8)
    outs = {"q_rope_out": q_out[..., 128:192], "k_rope_out": k_out[..., 128:192]}
    outs |= {"q_nope_out": q_out[..., :128], "k_nope_out": k_out[..., :128]}
    returned = rope_quantize_fp8(**inputs, **outs)
    assert [out.data_ptr() for out in returned] == [out.data_ptr() for out in outs.values()]
    same(returned[:2], reference(**inputs, q_rope_out_dtype=fp8)[:2])
    same((outs["q_nope_out"], outs["k_nope_out"]), reference(**inputs, q_rope_out_dtype=fp8)[2:])
    assert (q_out[..., 192:].float() == 7).all() and (k_out[..., 192:].float() == 7).all()


def test_inputs_are_slices_of_wider_buffers(device):
    q, k = randn(5, 4, 192, dtype=torch.bfloat16, device=device), randn(5, 192, dtype=torch.bfloat16, device=device)
    inputs = quantize_inputs(5, 4, 0, 64, 128, torch.bfloat16, device)
    inputs |= {"q_rope": q[..., 128:], "q_nope": q[..., :128], "k_rope": k[..., 128:], "k_nope": k[..., :128]}
    same(rope_quantize_fp8(**inputs), reference(**inputs))


def test_backends(device):
    inputs = quantize_inputs(2, 4, 0, 64, 128, torch.bfloat16, device)
    with pytest.raises(ValueError, match="backend must be 'cuda' or 'cutile', got 'triton'"):
        rope_quantize_fp8(**inputs, backend="triton")
    with pytest.raises(NotImplementedError, match="is_neox=True"):
        rope_quantize_fp8(**inputs, backend="cutile")
    gqa = quantize_inputs(2, 4, 2, 64, 128, torch.bfloat16, device)
    with pytest.raises(NotImplementedError, match="a 3-D k_rope"):
        rope_quantize_fp8(**gqa, is_neox=False, backend="cutile")
    try:
        import cuda.tile  # noqa: F401
    except ImportError:
        with pytest.raises(LibraryError, match="needs the package cuda"):
            rope_quantize_fp8(**inputs, is_neox=False, backend="cutile")
    else:
        same(rope_quantize_fp8(**inputs, is_neox=False, backend="cutile"), reference(**inputs, is_neox=False))


# append ---------------------------------------------------------------------------------------------------------------


def append_inputs(nnz, heads, kv_heads, rope_dim, nope_dim, dtype, device, fp8, layout="NHD", page_size=16, requests=3):
    """Assign tokens to requests in turn, on shuffled pages; every slot of the caches holds 7."""
    inputs = quantize_inputs(nnz, heads, kv_heads, rope_dim, nope_dim, dtype, device)
    slots = -(-nnz // requests)
    pages = -(-max(slots, 1) // page_size)
    order = torch.randperm(requests * pages + 2)[: requests * pages]
    token = torch.arange(nnz)
    head_dim = rope_dim + nope_dim
    slot = (page_size,) if not kv_heads else (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    widths = (head_dim, head_dim) if kv_heads else (nope_dim, rope_dim)
    indices = {
        "kv_indices": order,
        "kv_indptr": torch.arange(requests + 1) * pages,
        "batch_indices": token % requests,
        "positions": token // requests,
    }
    return {
        **inputs,
        "v": randn(nnz, kv_heads, head_dim, dtype=dtype, device=device) if kv_heads else None,
        "paged_kv_cache": tuple(
            torch.full((requests * pages + 2, *slot, width), 7.0, device=device).to(fp8) for width in widths
        ),
        **{name: index.int().to(device) for name, index in indices.items()},
    }


def check_append(inputs, layout="NHD", **options):
    """Check outputs and caches, including that every byte not written is unchanged."""
    caches = inputs["paged_kv_cache"]
    call = {name: value for name, value in inputs.items() if name != "paged_kv_cache"}
    expected = append_reference(
        **call, first_cache=caches[0], second_cache=caches[1], **options, heads_first=int(layout == "HND")
    )
    page_size = caches[0].shape[2 if layout == "HND" and caches[0].ndim == 4 else 1]
    target = {"quantize_dtype": caches[0].dtype, "page_size": page_size, "kv_layout": layout}
    actual = rope_quantize_fp8_append_paged_kv_cache(**inputs, **options, **target)
    kept = inputs["batch_indices"] >= 0
    same([out[kept] for out in actual], [out[kept] for out in expected[:2]])
    same(caches, expected[2:])


@on_any_fp8
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_append(device, model, page_size, layout, is_neox, fp8):
    inputs = append_inputs(37, *model, torch.bfloat16, device, fp8, layout, page_size)
    check_append(inputs, layout, is_neox=is_neox, **SCALES)


@pytest.mark.parametrize("model", [(8, 0, 64, 128), (8, 2, 64, 64)], ids=["mla", "gqa"])
def test_padding_writes_nothing(device, model):
    inputs = append_inputs(20, *model, torch.float16, device, torch.float8_e4m3fn)
    inputs["batch_indices"][[0, 7, 19]] = -1
    q_rope_out = torch.full((20, 8, 64), 3.0, device=device).to(torch.float8_e4m3fn)
    q_nope_out = torch.full((20, 8, model[3]), 3.0, device=device).to(torch.float8_e4m3fn)
    check_append(inputs)
    rope_quantize_fp8_append_paged_kv_cache(**inputs, q_rope_out=q_rope_out, q_nope_out=q_nope_out)
    assert (q_rope_out[[0, 7, 19]].float() == 3).all() and (q_nope_out[[0, 7, 19]].float() == 3).all()
    assert not (q_rope_out[1].float() == 3).all()


@pytest.mark.parametrize("nnz", [0, 1, 1100])
def test_numbers_of_tokens(device, nnz):
    check_append(append_inputs(nnz, 16, 0, 64, 256, torch.bfloat16, device, torch.float8_e4m3fn))


def test_wide_indices(device):
    inputs = append_inputs(20, 4, 2, 64, 64, torch.bfloat16, device, torch.float8_e4m3fn)
    for name in ("kv_indices", "kv_indptr", "batch_indices", "positions"):
        inputs[name] = inputs[name].long()
    check_append(inputs)


@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_dependent_launch(device, enable_pdl):
    """Check PDL; None means: if the GPU supports it."""
    inputs = append_inputs(5, 4, 0, 64, 128, torch.bfloat16, device, torch.float8_e4m3fn)
    alone = {name: inputs[name] for name in quantize_inputs(0, 1, 0, 2, 2, torch.bfloat16, device)}
    same(rope_quantize_fp8(**alone, enable_pdl=enable_pdl), reference(**alone))
    q_rope, q_nope = rope_quantize_fp8_append_paged_kv_cache(**inputs, enable_pdl=enable_pdl)
    same((q_rope, q_nope), reference(**alone)[::2])


def test_cache_slices_of_one_buffer(device):
    """Check both caches in one allocation, (pages, 2, page_size, heads, dim): pages of a cache are two apart."""
    inputs = append_inputs(20, 4, 2, 64, 64, torch.bfloat16, device, torch.float8_e4m3fn)
    both = torch.stack(inputs["paged_kv_cache"], dim=1)
    inputs["paged_kv_cache"] = both[:, 0], both[:, 1]
    check_append(inputs)


@settings(max_examples=30)
@given(data=st.data())
def test_any_shape(device, data):
    nnz, heads = data.draw(st.integers(0, 9), label="nnz"), data.draw(st.integers(1, 5), label="heads")
    kv_heads = data.draw(st.integers(0, 3), label="kv_heads")
    rope_dim = 2 * data.draw(st.integers(1, 32), label="pairs")
    nope_dim = data.draw(st.integers(1 - bool(kv_heads), 70), label="nope_dim")
    dtype, fp8 = data.draw(st.sampled_from(DTYPES), label="dtype"), data.draw(st.sampled_from(FP8), label="fp8")
    layout = data.draw(st.sampled_from(["NHD", "HND"]), label="layout")
    page_size = data.draw(st.integers(1, 9), label="page_size")
    inputs = append_inputs(nnz, heads, kv_heads, rope_dim, nope_dim, dtype, device, fp8, layout, page_size)
    padding = data.draw(st.lists(st.booleans(), min_size=nnz, max_size=nnz), label="padding")
    inputs["batch_indices"][torch.tensor(padding, dtype=torch.bool, device=device)] = -1
    check_append(inputs, layout, is_neox=data.draw(st.booleans(), label="is_neox"), **SCALES)
