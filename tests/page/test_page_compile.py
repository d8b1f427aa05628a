# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) and CUDA graphs of the page family."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..tensors import randn
from .inputs import make_batch, make_cache, same

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_tensors(device):
    batch = make_batch([21, 6], [20, 3], 8, device)
    k, v = (randn(batch.nnz, 2, 64, dtype=BF16, device=device) for _ in range(2))
    pages = batch.num_pages
    return {
        "k": k,
        "v": v,
        "append_indptr": torch.tensor([0, 20, 23], dtype=torch.int32, device=device),
        "indices": batch.kv_indices,
        "indptr": batch.kv_indptr,
        "last": batch.kv_last_page_len,
        "cache": make_cache("NHD", "combined", pages, 8, 2, 64, dtype=BF16, device=device),
        "codes": torch.zeros(pages, 2, 8, 2, 32, dtype=torch.uint8, device=device),
        "sf": torch.zeros(pages, 2, 8, 2, 4, device=device).to(E4M3),
        "scale": torch.full((1,), 0.1, device=device),
    }


def by_table(k, v, append_indptr, indices, indptr, last, cache, codes, sf, scale):
    lengths = flashinfer.get_seq_lens(indptr, last, 8)
    b, p = flashinfer.get_batch_indices_positions(append_indptr, lengths, k.shape[0])
    flashinfer.append_paged_kv_cache(k * 2, v, b, p, cache, indices, indptr, last)
    flashinfer.append_paged_kv_cache(v, k, b, p, (cache[:, 0], cache[:, 1]), indices.long(), indptr, last, "NHD")
    flashinfer.append_paged_mla_kv_cache(
        k[:, 0], v[:, 0], b, p, cache[:, 0, :, 0], cache[:, 1, :, 0], indices, indptr, last
    )
    flashinfer.nvfp4_quantize_append_paged_kv_cache(k, v, b, p, codes, sf, indices, indptr, last, 0.5, 0.25)
    return b + p


def by_slot(k, v, append_indptr, indices, indptr, last, cache, codes, sf, scale):
    slots = torch.arange(k.shape[0], device=k.device)
    flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots, codes, sf, scale, 0.25)
    return slots + 1


@pytest.mark.parametrize("model", [by_table, by_slot], ids=lambda model: model.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_same_numbers(device, model, backend):
    tensors = make_tensors(device)
    eager, compiled = ({name: t.clone() for name, t in tensors.items()} for _ in range(2))
    expected = model(**eager)
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(**compiled), expected)
    for name in tensors:  # exactly the arguments that are written to
        assert torch.equal(compiled[name].view(torch.uint8), eager[name].view(torch.uint8)), name
    assert not same(eager["codes"], tensors["codes"])


def test_ops_have_their_published_names():
    for name in ("append_paged_kv_cache", "append_paged_mla_kv_cache"):
        assert getattr(torch.ops.flashinfer, name).default._schema.is_mutable


@needs_gpu
def test_graph_follows_its_buffers():
    """Capture once, then replay with other rows, pages and scales."""
    tensors = make_tensors("cuda")
    by_table(**tensors)  # builds and loads the modules, which must not happen during a capture
    by_slot(**tensors)
    b, p = (torch.empty(23, dtype=torch.int32, device="cuda") for _ in range(2))
    slots = torch.arange(23, device="cuda")

    def step(k, v, append_indptr, indices, indptr, last, cache, codes, sf, scale):
        flashinfer.get_batch_indices_positions(append_indptr, flashinfer.get_seq_lens(indptr, last, 8), 23, b, p)
        flashinfer.append_paged_kv_cache(k, v, b, p, cache, indices, indptr, last)
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots, codes, sf, scale, scale)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**tensors)
    tensors["k"].normal_()
    tensors["scale"].fill_(0.3)
    slots.copy_(slots.flip(0))
    tensors["indices"].copy_(tensors["indices"].flip(0))
    tensors["append_indptr"].copy_(torch.tensor([0, 18, 22]))
    direct = tensors | {name: tensors[name].clone() for name in ("cache", "codes", "sf")}
    step(**direct)
    graph.replay()
    for name in ("cache", "codes", "sf"):
        assert same(tensors[name], direct[name]), name


@needs_gpu
def test_validation_leaves_a_capture_alone(monkeypatch):
    tensors = make_tensors("cuda")
    by_table(**tensors)
    monkeypatch.setattr(flashinfer.page.modules, "VALIDATE", True)
    by_table(**tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_table(**tensors)
    graph.replay()
    torch.cuda.synchronize()
