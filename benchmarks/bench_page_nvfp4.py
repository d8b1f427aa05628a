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

NAME = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
PAGE_SIZE, HEADS, HEAD_DIM = 16, 8, 128


def _torch_append(k: Any, v: Any, slots: Any, cache: Any, sf: Any, k_scale: Any, v_scale: Any) -> None:
    pages, entries = slots // PAGE_SIZE, slots % PAGE_SIZE
    for half, (rows, scale) in enumerate(((k, k_scale), (v, v_scale))):
        codes, scales = quantize_nvfp4(rows, scale)
        cache[pages, half, entries] = codes
        sf.view(torch.uint8)[pages, half, entries] = scales.view(torch.uint8)


@case(NAME, cpu=grid(num_tokens=[1, 512]), cuda=grid(num_tokens=[1, 64, 16384]))
def nvfp4_append(num_tokens: int) -> Bench:
    k, v = (rand(num_tokens, HEADS, HEAD_DIM, bf16) for _ in range(2))
    pages = -(-num_tokens // PAGE_SIZE)
    slots = torch.randperm(pages * PAGE_SIZE)[:num_tokens]
    cache = torch.zeros(pages, 2, PAGE_SIZE, HEADS, HEAD_DIM // 2, dtype=torch.uint8)
    sf = torch.zeros(pages, 2, PAGE_SIZE, HEADS, HEAD_DIM // 16).to(e4m3)
    scale = torch.full((1,), 0.01)
    reference = getattr(templates, f"{NAME}_trace").reference
    return Bench(
        run=getattr(page, NAME),
        args=(k, v, slots, cache, sf, scale, scale),
        results=(3, 4),
        baseline=_torch_append,
        reference=lambda *args: reference(*args, heads_first=0),
        bytes=nbytes(k, v, slots) + (nbytes(k, v) // 32) * 9,
    )


if __name__ == "__main__":
    main()
