# SPDX-License-Identifier: Apache-2.0
"""Batches for the attention tests: dense, ragged and paged keys in every layout, with NaN in memory beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch

from ..tensors import randn
from . import reference
from .reference import Attention, Result

LAYOUTS = ["NHD", "HND"]
#: One tensor for keys and values; two tensors of equal strides; two tensors of different strides.
FORMS = ["combined", "pair", "separate"]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def offsets(lengths: Sequence[int]) -> list[int]:
    """Return the prefix sum of the lengths: ``[3, 1]`` gives ``[0, 3, 4]``."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def int32(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``[..., tokens, heads, head_dim]`` in the order of ``layout``, contiguous."""
    return (x.transpose(-3, -2) if layout == "HND" else x).contiguous()


def strided(x: torch.Tensor, gap: int, fill: float = math.nan) -> torch.Tensor:
    """Copy the values into the first columns of a wider buffer; ``gap`` must keep rows aligned to 16 bytes."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), fill, device=x.device).to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@dataclass
class Pages:
    """Page table of a batch: shuffled pages of a pool that has more pages than needed."""

    kv_lens: Sequence[int]
    page_size: int
    device: str
    spare: int = 3

    def __post_init__(self) -> None:
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        self.indptr_host = offsets(counts)
        self.num_pages = self.indptr_host[-1] + self.spare
        self.indices_host = torch.randperm(self.num_pages)[: self.indptr_host[-1]].tolist()
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in self.kv_lens]
        self.indptr = int32(self.indptr_host, self.device)
        self.indices = int32(self.indices_host, self.device)
        self.last_page_len = int32(last, self.device)
        self.lens = int32(self.kv_lens, self.device)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indptr, indices and last_page_len, in the order of ``plan``."""
        return self.indptr, self.indices, self.last_page_len

    def slots(self, request: int) -> torch.Tensor:
        """Return the slot of each key in the pool of all pages: ``page * page_size + entry``."""
        pages = self.indices_host[self.indptr_host[request] : self.indptr_host[request + 1]]
        every = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size + torch.arange(self.page_size)
        return every.view(-1)[: self.kv_lens[request]].to(self.device)

    def scatter(self, rows: torch.Tensor, layout: str) -> torch.Tensor:
        """Write the rows of all requests into pages; every other entry of the pool is NaN (0x7f in bytes)."""
        fill = 0x7F if rows.dtype == torch.uint8 else math.nan
        pool = torch.full((self.num_pages * self.page_size, *rows.shape[1:]), fill, device=self.device).to(rows.dtype)
        at = [self.slots(i) for i in range(len(self.kv_lens))]
        pool.view(torch.uint8)[torch.cat(at)] = rows.contiguous().view(torch.uint8)
        return to_layout(pool.view(self.num_pages, self.page_size, *rows.shape[1:]), layout)

    def block_tables(self) -> torch.Tensor:
        """Return a block table ``[batch, largest page count of a request]``; unused entries are 0."""
        lists = [self.indices_host[a:b] for a, b in zip(self.indptr_host[:-1], self.indptr_host[1:], strict=True)]
        width = max(1, *map(len, lists)) if lists else 1
        return torch.stack([int32(x + [0] * (width - len(x)), self.device) for x in lists])


def combine(k: torch.Tensor, v: torch.Tensor, form: str) -> Any:
    """Return keys and values of a paged cache in the given form, as callers pass them."""
    if form == "combined":
        return torch.stack([k, v], dim=1)
    if form == "pair":
        return strided(k, 16), strided(v, 16)
    return strided(k, 16), strided(v, 48)


@dataclass
class Batch:
    """Queries and keys of some requests. Rows of ``q``, ``k`` and ``v`` are concatenated by request (NHD)."""

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int = 0
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    device: str = "cpu"
    amplitude: float = 1.0
    shared_prefix: int = 0  #: number of keys that all requests share
    latent: bool = False  #: True for MLA: values are the first columns of keys

    def __post_init__(self) -> None:
        self.head_dim_vo = self.head_dim_vo or self.head_dim_qk
        self.kv_dtype = self.kv_dtype or self.dtype
        self.qo_indptr_host, self.kv_indptr_host = offsets(self.qo_lens), offsets(self.kv_lens)
        self.qo_indptr, self.kv_indptr = (int32(x, self.device) for x in (self.qo_indptr_host, self.kv_indptr_host))
        shape = (self.qo_indptr_host[-1], self.num_qo_heads, self.head_dim_qk)
        self.q = (self.amplitude * torch.randn(*shape, device=self.device)).to(self.dtype)
        self.k, self.k_sf = self._rows(self.head_dim_qk)
        self.v, self.v_sf = self._rows(self.head_dim_vo)
        for rows in (self.k, self.v):
            for start in self.kv_indptr_host[1:-1]:
                rows[start : start + self.shared_prefix] = rows[: self.shared_prefix]
        if self.latent:
            self.v = self.k[..., : self.head_dim_vo]

    def _rows(self, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make keys or values as stored, and the scale factors of NVFP4 (bytes: two codes each)."""
        shape = (self.kv_indptr_host[-1], self.num_kv_heads)
        if self.kv_dtype != torch.uint8:
            return randn(*shape, head_dim, dtype=self.kv_dtype, device=self.device), None
        codes = torch.randint(0, 256, (*shape, head_dim // 2), dtype=torch.uint8, device=self.device)
        factors = 0.1 + torch.rand(*shape, head_dim // 16, device=self.device)
        return codes, factors.to(torch.float8_e4m3fn)

    def part(self, begin: int, end: int) -> Batch:
        """Return requests ``begin`` to ``end`` as a new batch."""
        rows, keys = (slice(x[begin], x[end]) for x in (self.qo_indptr_host, self.kv_indptr_host))
        some = replace(self, qo_lens=self.qo_lens[begin:end], kv_lens=self.kv_lens[begin:end], shared_prefix=0)
        some.q, some.k, some.v = self.q[rows], self.k[keys], self.v[keys]
        if self.k_sf is not None and self.v_sf is not None:
            some.k_sf, some.v_sf = self.k_sf[keys], self.v_sf[keys]
        return some

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_qo_heads, self.num_kv_heads

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as floats, before ``k_scale`` and ``v_scale``."""
        return read(self.k, self.k_sf), read(self.v, self.v_sf)

    def dense(self, layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values without pages."""
        return to_layout(self.k, layout), to_layout(self.v, layout)

    def pages(self, page_size: int, spare: int = 3) -> Pages:
        return Pages(self.kv_lens, page_size, self.device, spare)

    def cache(self, pages: Pages, layout: str = "NHD", form: str = "pair") -> Any:
        """Return keys and values in pages."""
        return combine(pages.scatter(self.k, layout), pages.scatter(self.v, layout), form)

    def cache_sf(self, pages: Pages, layout: str = "NHD") -> Any:
        """Return the scale factors in pages, for ``kv_cache_sf``."""
        assert self.k_sf is not None and self.v_sf is not None
        return pages.scatter(self.k_sf, layout), pages.scatter(self.v_sf, layout)

    def expected(self, what: Attention | Sequence[Attention] = Attention()) -> Result:  # noqa: B008, frozen
        """Return output and LSE of the reference in float32."""
        return reference.ragged(what, self.q, *self.values(), self.qo_indptr_host, self.kv_indptr_host)


def read(rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Decode stored keys or values to floats. NVFP4: low nibble first, bit 3 is the sign, one scale per 16 elements."""
    if factors is None:
        return rows.float()
    code = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2).long()
    magnitude = torch.tensor(E2M1, device=rows.device)[code & 7]
    return torch.where(code >= 8, -magnitude, magnitude) * factors.float().repeat_interleave(16, dim=-1)
