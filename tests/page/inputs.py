# SPDX-License-Identifier: Apache-2.0
"""Batches and caches that the page tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flashinfer

from ..tensors import randn

LAYOUTS = ["NHD", "HND"]
FORMS = ["combined", "pair"]


@dataclass
class Batch:
    """Growing requests: page tables after the append, and the appended rows."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    num_pages: int

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch_indices, self.positions

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len

    @property
    def nnz(self) -> int:
        return self.batch_indices.shape[0]


def make_batch(lengths, appended, page_size, device, spare_pages=2, padding=0):
    """Make requests of ``lengths`` tokens, the last ``appended`` of which are new; ``padding`` rows have no request."""
    pages = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages) + spare_pages
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.randperm(num_pages)[: sum(pages)].to(torch.int32)
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in lengths], dtype=torch.int32)
    append_indptr = torch.tensor([0, *torch.tensor(appended).cumsum(0).tolist()], dtype=torch.int32, device=device)
    indptr, indices, last = (t.to(device) for t in (indptr, indices, last))
    seq_lens = flashinfer.get_seq_lens(indptr, last, page_size)
    assert seq_lens.tolist() == list(lengths)
    nnz = sum(appended) + padding
    return Batch(
        *flashinfer.get_batch_indices_positions(append_indptr, seq_lens, nnz), indices, indptr, last, num_pages
    )


def make_cache(layout, form, num_pages, page_size, heads, dim, *, dtype, device, pad=0):
    """Make a cache of noise. ``pad`` unused elements after each head leave only the last dimension contiguous."""
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    shape = (num_pages, *inner, dim + pad) if form == "pair" else (num_pages, 2, *inner, dim + pad)
    if form == "pair":
        return tuple(randn(*shape, dtype=dtype, device=device)[..., :dim] for _ in range(2))
    return randn(*shape, dtype=dtype, device=device)[..., :dim]


def whole(cache):
    """Return the whole memory of a cache as bytes, gaps included."""
    tensors = cache if isinstance(cache, tuple) else (cache,)
    return tuple((t if t._base is None else t._base).clone().view(torch.uint8) for t in tensors)


def clone(cache):
    """Return a copy with the same strides and the same gaps."""
    if isinstance(cache, tuple):
        return tuple(clone(t) for t in cache)
    base = cache if cache._base is None else cache._base
    return base.clone()[..., : cache.shape[-1]]


def halves(cache):
    return cache if isinstance(cache, tuple) else tuple(cache.unbind(1))


def same(one, other):
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(halves(one), halves(other), strict=True)
    )
