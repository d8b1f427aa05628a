# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of appending in NVFP4: 2 bytes of a key are read, 0.56 written.

python benchmarks/bench_page_nvfp4.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, bf16, case, e4m3, grid, main, nbytes, rand

import flashinfer.page as page
from flashinfer.trace.templates import page as templates
from flashinfer.trace.templates.page_nvfp4 import quantize_nvfp4
from flashinfer.trace.templates.page_nvfp4_mla import nvfp4_quantize_append_paged_mla_kv_cache_trace

PAGE_SIZE, HEADS, HEAD_DIM = 16, 8, 128
SCALE = 0.01
CPU, CUDA = grid(num_tokens=[1, 512]), grid(num_tokens=[1, 64, 16384])


def _torch_append(k: Any, v: Any, slots: Any, cache: Any, sf: Any, k_scale: Any, v_scale: Any) -> None:
    pages, entries = slots // PAGE_SIZE, slots % PAGE_SIZE
    for half, (rows, scale) in enumerate(((k, k_scale), (v, v_scale))):
        codes, scales = quantize_nvfp4(rows, scale)
        cache[pages, half, entries] = codes
        sf.view(torch.uint8)[pages, half, entries] = scales.view(torch.uint8)


def _tensors(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Keys, values, and a cache with its scales that has room for them."""
    k, v = (rand(num_tokens, HEADS, HEAD_DIM, bf16) for _ in range(2))
    pages = -(-num_tokens // PAGE_SIZE)
    cache = torch.zeros(pages, 2, PAGE_SIZE, HEADS, HEAD_DIM // 2, dtype=torch.uint8)
    return k, v, cache, torch.zeros(pages, 2, PAGE_SIZE, HEADS, HEAD_DIM // 16).to(e4m3)


def _bytes(k: torch.Tensor, v: torch.Tensor, *indices: torch.Tensor) -> int:
    return nbytes(k, v, *indices) + (nbytes(k, v) // 32) * 9


@case("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", cpu=CPU, cuda=CUDA)
def append_by_slots(num_tokens: int) -> Bench:
    k, v, cache, sf = _tensors(num_tokens)
    slots = torch.randperm(cache.shape[0] * PAGE_SIZE)[:num_tokens]
    scale = torch.full((1,), SCALE)
    reference = templates.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace.reference
    assert reference is not None
    return Bench(
        run=page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
        args=(k, v, slots, cache, sf, scale, scale),
        results=(3, 4),
        baseline=_torch_append,
        reference=lambda *args: reference(*args, heads_first=0),
        bytes=_bytes(k, v, slots),
    )


@case("nvfp4_quantize_append_paged_kv_cache", cpu=CPU, cuda=CUDA)
def append_by_table(num_tokens: int) -> Bench:
    """All tokens of one request, on pages in random order."""
    k, v, cache, sf = _tensors(num_tokens)
    pages = cache.shape[0]
    batch_indices, positions = torch.zeros(num_tokens).int(), torch.arange(num_tokens).int()
    indices, indptr, last = torch.randperm(pages).int(), torch.tensor([0, pages]).int(), torch.tensor([1]).int()
    reference = templates.nvfp4_quantize_append_paged_kv_cache_trace.reference
    assert reference is not None

    def baseline(k: Any, v: Any, b: Any, p: Any, cache: Any, sf: Any, indices: Any, indptr: Any, *rest: Any) -> None:
        slots = indices[indptr[b].long() + p // PAGE_SIZE].long() * PAGE_SIZE + p % PAGE_SIZE
        _torch_append(k, v, slots, cache, sf, SCALE, SCALE)

    return Bench(
        run=page.nvfp4_quantize_append_paged_kv_cache,
        args=(k, v, batch_indices, positions, cache, sf, indices, indptr, last, SCALE, SCALE),
        results=(4, 5),
        baseline=baseline,
        reference=lambda *args: reference(*args, heads_first=0),
        bytes=_bytes(k, v, batch_indices, positions),
    )


@case("nvfp4_quantize_append_paged_mla_kv_cache", cpu=CPU, cuda=CUDA)
def append_mla(num_tokens: int) -> Bench:
    pages = -(-num_tokens // PAGE_SIZE)
    ckv, kpe = rand(num_tokens, 512, bf16), rand(num_tokens, 64, bf16)
    codes, sf, rope = (torch.zeros(pages, PAGE_SIZE, size, dtype=torch.uint8) for size in (256, 32, 64))
    request, positions = torch.zeros(num_tokens).int(), torch.arange(num_tokens).int()
    indices, indptr, last = torch.randperm(pages).int(), torch.tensor([0, pages]).int(), torch.tensor([1]).int()
    reference = nvfp4_quantize_append_paged_mla_kv_cache_trace.reference
    return Bench(
        run=page.nvfp4_quantize_append_paged_mla_kv_cache,
        args=(ckv, kpe, request, positions, codes, sf, rope, indices, indptr, last, SCALE, SCALE),
        results=(4, 5, 6),
        reference=lambda *args: reference(*args[:9], SCALE, SCALE),
        bytes=nbytes(ckv, kpe, request, positions) + num_tokens * (256 + 32 + 64),
    )


if __name__ == "__main__":
    main()
