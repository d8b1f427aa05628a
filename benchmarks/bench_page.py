# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of appending to a paged cache: all of it moves memory, so the figure to read is the fraction of peak.

python benchmarks/bench_page.py [-k append] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, bf16, case, e4m3, empty, grid, main, nbytes, rand

import flashinfer.page as page
from flashinfer.trace.templates import page as templates

# Decode steps of small and large batches, prompts, and a width no vector divides.
CUDA = grid(num_tokens=[1, 64, 1024, 16384], num_heads=[8], head_dim=[128], page_size=[16], dtype=[bf16])
CUDA += grid(num_tokens=[16384], num_heads=[8], head_dim=[128], page_size=[16], dtype=[e4m3])
CUDA += grid(num_tokens=[16384], num_heads=[8], head_dim=[128], page_size=[5], dtype=[bf16])
CUDA += grid(num_tokens=[16384], num_heads=[1], head_dim=[128], page_size=[64], dtype=[bf16])
CUDA += grid(num_tokens=[16384], num_heads=[8], head_dim=[99], page_size=[16], dtype=[bf16])
CPU = grid(num_tokens=[1, 64, 2048], num_heads=[8], head_dim=[128], page_size=[16], dtype=[bf16])
MLA_CUDA = grid(num_tokens=[64, 16384], page_size=[64])
MLA_CPU = grid(num_tokens=[64, 4096], page_size=[64])


def _batch(num_tokens: int, page_size: int) -> dict[str, torch.Tensor]:
    """Up to 16 requests that append all their tokens, on pages in random order."""
    requests = min(16, num_tokens)
    pages = -(-(num_tokens // requests) // page_size)
    return {
        "batch_indices": torch.arange(requests, dtype=torch.int32).repeat_interleave(num_tokens // requests),
        "positions": torch.arange(num_tokens // requests, dtype=torch.int32).repeat(requests),
        "kv_indices": torch.randperm(requests * pages).to(torch.int32),
        "kv_indptr": torch.arange(requests + 1, dtype=torch.int32) * pages,
        "kv_last_page_len": torch.full((requests,), (num_tokens // requests - 1) % page_size + 1, dtype=torch.int32),
    }


def _slots(b: torch.Tensor, p: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, page_size: int) -> Any:
    p = p.long()
    return indices[indptr[b.long()].long() + p // page_size].long(), p % page_size


def _torch_append(k: Any, v: Any, b: Any, p: Any, cache: Any, indices: Any, indptr: Any, last: Any) -> None:
    pages, entries = _slots(b, p, indices, indptr, cache.shape[2])
    if cache.dtype.itemsize == 1:  # torch cannot index fp8
        k, v, cache = (t.view(torch.uint8) for t in (k, v, cache))
    cache[pages, 0, entries] = k
    cache[pages, 1, entries] = v


@case("append_paged_kv_cache", cpu=CPU, cuda=CUDA)
def append_paged_kv_cache(num_tokens: int, num_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> Bench:
    k, v = (rand(num_tokens, num_heads, head_dim, dtype) for _ in range(2))
    batch = _batch(num_tokens, page_size)
    cache = empty(batch["kv_indices"].shape[0], 2, page_size, num_heads, head_dim, dtype)
    b, p, *table = batch.values()
    return Bench(
        run=page.append_paged_kv_cache,
        args=(k, v, b, p, cache, *table),
        results=(4,),
        baseline=_torch_append,
        reference=lambda *args: templates.append_paged_kv_cache_trace.reference(*(x.clone() for x in args)),
        bytes=2 * nbytes(k, v) + nbytes(b, p),
    )


def _torch_append_mla(ckv: Any, kpe: Any, b: Any, p: Any, c: Any, r: Any, indices: Any, indptr: Any, last: Any) -> None:
    where = _slots(b, p, indices, indptr, c.shape[1])
    c[where], r[where] = ckv, kpe


@case("append_paged_mla_kv_cache", cpu=MLA_CPU, cuda=MLA_CUDA)
def append_paged_mla_kv_cache(num_tokens: int, page_size: int) -> Bench:
    ckv, kpe, batch = rand(num_tokens, 512, bf16), rand(num_tokens, 64, bf16), _batch(num_tokens, page_size)
    caches = [empty(batch["kv_indices"].shape[0], page_size, dim, bf16) for dim in (512, 64)]
    b, p, *table = batch.values()
    return Bench(
        run=page.append_paged_mla_kv_cache,
        args=(ckv, kpe, b, p, *caches, *table),
        results=(4, 5),
        baseline=_torch_append_mla,
        reference=lambda *args: templates.append_paged_mla_kv_cache_trace.reference(*(x.clone() for x in args)),
        bytes=2 * nbytes(ckv, kpe) + nbytes(b, p),
    )


def _torch_indices(indptr: torch.Tensor, lengths: torch.Tensor, nnz: int) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(nnz, dtype=torch.int32, device=indptr.device)
    b = torch.searchsorted(indptr[1:], row, right=True)
    return b.int(), row + lengths[b] - indptr[b + 1]


@case(
    "get_batch_indices_positions",
    cpu=grid(batch_size=[16, 256], num_tokens=[4096]),
    cuda=grid(batch_size=[16, 256], num_tokens=[256, 16384]),
)
def get_batch_indices_positions(batch_size: int, num_tokens: int) -> Bench:
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * (num_tokens // batch_size)
    lengths = torch.full((batch_size,), num_tokens // batch_size + 5, dtype=torch.int32)
    return Bench(
        run=page.get_batch_indices_positions,
        args=(indptr, lengths, num_tokens),
        baseline=_torch_indices,
        reference=templates.get_batch_indices_positions_trace.reference,
        bytes=nbytes(indptr, lengths) + 8 * num_tokens,
    )


def _torch_lengths(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    return torch.where(indptr.diff() > 0, indptr.diff() - 1, 0) * page_size + last


@case("get_seq_lens", grid(batch_size=[16, 256]))
def get_seq_lens(batch_size: int) -> Bench:
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * 4
    last = torch.full((batch_size,), 3, dtype=torch.int32)
    return Bench(
        run=page.get_seq_lens,
        args=(indptr, last, 16),
        baseline=_torch_lengths,
        reference=templates.get_seq_lens_trace.reference,
        bytes=nbytes(indptr, last, last),
    )


if __name__ == "__main__":
    main()
