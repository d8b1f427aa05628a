# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) of the rope family, and CUDA graphs: the same numbers as eager calls."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_close
from flashinfer.trace.templates.rope import apply_rope_pos_ids_trace

from ..graphs import capture
from .inputs import quantize_inputs, table


def make_tensors(device):
    q, k = torch.randn(6, 4, 64, device=device).bfloat16(), torch.randn(6, 2, 64, device=device).bfloat16()
    return {"q": q, "k": k, "pos_ids": torch.arange(6, device=device), "cache": table(64, 16, device)}


def allocating(q, k, pos_ids, cache):
    indptr, offsets = torch.tensor([0, 2, 6], device=q.device), torch.tensor([3, 1], device=q.device)
    q, k = flashinfer.apply_rope(q * 2, k, indptr, offsets)
    q, k = flashinfer.apply_llama31_rope(q, k, indptr, offsets, interleave=True)
    q, k = flashinfer.apply_rope_pos_ids(q, k, pos_ids, rotary_dim=32)
    q, k = flashinfer.apply_llama31_rope_pos_ids(q, k, pos_ids)
    return flashinfer.apply_rope_with_cos_sin_cache(pos_ids, q, k, 64, cache)


def in_place(q, k, pos_ids, cache):
    q, k = q + 1, k * 2
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids)
    flashinfer.apply_llama31_rope_pos_ids_inplace(q, k, pos_ids, interleave=True)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(pos_ids, q, k, 64, cache, is_neox=False)
    return q.float().sum() + k.float().sum(), q, k


def writes_to_arguments(q, k, pos_ids, cache):
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids)
    return q + 1


def slices_of_a_projection(q, k, pos_ids, cache):
    qkv = torch.cat([q, k, k], dim=1)
    flashinfer.apply_rope_pos_ids_inplace(qkv[:, :4], qkv[:, 4:6], pos_ids)
    return qkv * 2


MODELS = [allocating, in_place, writes_to_arguments, slices_of_a_projection]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_same_numbers(device, model, backend):
    tensors = make_tensors(device)
    eager, compiled = ({name: t.clone() for name, t in tensors.items()} for _ in range(2))
    expected = model(**eager)
    actual = torch.compile(model, fullgraph=True, backend=backend)(**compiled)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    for name in tensors:  # exactly the arguments that are written to
        assert torch.equal(compiled[name], eager[name]), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_quantising_forms(device, backend):
    inputs = quantize_inputs(6, 4, 0, 64, 128, torch.bfloat16, device)
    tokens = torch.arange(6, dtype=torch.int32, device=device)
    pages = {"kv_indices": tokens, "kv_indptr": tokens[:2] * 6, "batch_indices": tokens * 0, "positions": tokens}

    def model(ckv, kpe):
        outputs = flashinfer.rope_quantize_fp8(**inputs)
        q = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
            **inputs, v=None, paged_kv_cache=(ckv, kpe), **pages, page_size=1
        )
        return [out.float() for out in (*outputs, *q)]

    def caches():
        return (torch.zeros(6, 1, width, device=device).to(torch.float8_e4m3fn) for width in (128, 64))

    eager, compiled = tuple(caches()), tuple(caches())
    expected = model(*eager)
    for one, other in zip(torch.compile(model, fullgraph=True, backend=backend)(*compiled), expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(compiled, eager, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_symbolic_batch(device):
    tensors = make_tensors(device)
    compiled = torch.compile(flashinfer.apply_rope_pos_ids, fullgraph=True, dynamic=True, backend="aot_eager")
    for nnz in (2, 5, 6):
        call = tuple(tensors[name][:nnz] for name in ("q", "k", "pos_ids"))
        for one, other in zip(compiled(*call), flashinfer.apply_rope_pos_ids(*call), strict=True):
            assert torch.equal(one, other)


def test_ops_have_their_published_names():
    for name in (
        *("apply_rope", "apply_llama31_rope", "apply_rope_pos_ids", "apply_llama31_rope_pos_ids"),
        *("apply_rope_pos_ids_cos_sin_cache", "rope_quantize", "rope_quantize_append_paged_kv_cache"),
    ):
        assert getattr(torch.ops.flashinfer, name).default._schema.is_mutable


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_cuda_graph_replays_on_new_values():
    q, k, pos_ids, cache = make_tensors("cuda").values()
    indptr, offsets = torch.tensor([0, 2, 6], device="cuda"), torch.tensor([3, 1], device="cuda")

    def step():
        flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids)
        flashinfer.apply_rope_inplace(q, k, indptr, offsets)
        flashinfer.apply_rope_with_cos_sin_cache_inplace(pos_ids, q, k, 64, cache)

    graph, _ = capture(step)
    q.normal_()
    pos_ids.copy_(torch.tensor([5, 4, 3, 2, 1, 0], device="cuda"))
    indptr.copy_(torch.tensor([0, 5, 6], device="cuda"))
    expected = q.clone()
    for positions in (pos_ids, torch.tensor([3, 4, 5, 6, 7, 1], device="cuda"), pos_ids):
        expected = apply_rope_pos_ids_trace.reference(expected, k, positions)[0]
    graph.replay()
    assert_close(q, expected, atol=3e-2)  # three roundings to bfloat16


@needs_cuda
def test_rows_past_32_bits():
    """Check strides of 2^31 elements: two tokens of a large buffer."""
    buffer = torch.empty(2**31 + 1024, dtype=torch.float16, device="cuda")
    q = buffer.as_strided((2, 2, 128), (2**31, 128, 1))
    q.normal_()
    pos_ids = torch.tensor([3, 5], device="cuda")
    expected = apply_rope_pos_ids_trace.reference(q, q, pos_ids)[0]
    flashinfer.apply_rope_pos_ids_inplace(q, q[:, :1].clone(), pos_ids)
    assert_close(q, expected)


@needs_cuda
def test_more_tokens_than_a_grid_dimension():
    nnz = 70001
    q, k = (torch.randn(nnz, 1, 64, device="cuda").bfloat16() for _ in range(2))
    pos_ids = torch.arange(nnz, device="cuda")
    for one, other in zip(
        flashinfer.apply_rope_pos_ids(q, k, pos_ids), apply_rope_pos_ids_trace.reference(q, k, pos_ids), strict=True
    ):
        assert_close(one, other)
