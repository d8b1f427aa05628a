# SPDX-License-Identifier: Apache-2.0
"""Shared inputs of the attention benchmarks: a paged batch, the torch baseline, and counts of bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from harness import rand
from torch.nn.functional import scaled_dot_product_attention

from flashinfer.testing import attention_flops, attention_flops_with_actual_seq_lens

__all__ = [
    "PagedBatch", "attention_bytes", "attention_flops", "attention_flops_with_actual_seq_lens", "lengths", "offsets",
    "query_bytes", "torch_attention", "workspace",
]  # fmt: skip


def workspace() -> torch.Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8)


def lengths(batch_size: int, longest: int, is_random: bool) -> torch.Tensor:
    """Return the number of tokens of each request: ``longest``, or a random number from 1 to ``longest``."""
    return torch.randint(1, longest + 1, (batch_size,)) if is_random else torch.full((batch_size,), longest)


def offsets(counts: torch.Tensor) -> torch.Tensor:
    """Return the prefix sum of ``counts``: the first row of each request, then the total number of rows."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


@dataclass
class PagedBatch:
    """Requests on shuffled pages. If lengths are equal, ``k`` and ``v`` are the keys and values gathered for torch."""

    batch_size: int
    s_kv: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    dtype: torch.dtype
    has_random_lengths: bool = False

    def __post_init__(self) -> None:
        self.lengths = lengths(self.batch_size, self.s_kv, self.has_random_lengths)
        self.indptr = offsets(-(-self.lengths // self.page_size))
        count = int(self.indptr[-1])
        self.k_cache = rand(count, self.page_size, self.num_kv_heads, self.head_dim_qk, self.dtype)
        self.v_cache = rand(count, self.page_size, self.num_kv_heads, self.head_dim_vo, self.dtype)
        self.indices = torch.randperm(count).int()
        self.last_page_len = ((self.lengths - 1) % self.page_size + 1).int()
        if not self.has_random_lengths:
            self.k, self.v = (self._gathered(cache) for cache in (self.k_cache, self.v_cache))

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def bytes(self) -> int:
        """Size of all keys and values in bytes, each counted once."""
        each = self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.dtype.itemsize
        return int(self.lengths.sum()) * each

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        """Gather a cache to a contiguous ``[batch_size, heads, tokens, head_dim]``, the fastest layout for torch."""
        rows = cache[self.indices.long()].view(self.batch_size, -1, *cache.shape[2:])[:, : self.s_kv]
        return rows.transpose(1, 2).contiguous()


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Run torch's attention: ``q`` ``[batch * tokens, heads, head_dim]``, keys ``[batch, heads, tokens, head_dim]``.

    With one query per request, heads that share keys become rows of one matrix product: torch reads each key once.
    """
    batch_size, num_kv_heads, s_kv, _ = k.shape
    if q.shape[0] == batch_size:
        rows = q.view(batch_size, num_kv_heads, -1, q.shape[-1])
        # On a GPU the result may have heads inside rows, which is not contiguous: reshape works, a view does not.
        return scaled_dot_product_attention(rows, k, v).reshape(batch_size, q.shape[1], -1)
    q = q.view(batch_size, -1, *q.shape[1:]).transpose(1, 2)
    mask = None
    if causal and q.shape[2] != s_kv:
        mask = torch.ones(q.shape[2], s_kv, dtype=torch.bool, device=q.device).tril(s_kv - q.shape[2])
    is_causal = causal and mask is None
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def query_bytes(q: torch.Tensor, head_dim_vo: int, out_dtype: Optional[torch.dtype] = None) -> int:
    """Return the bytes of queries and results, each counted once."""
    out = q.numel() // q.shape[-1] * head_dim_vo * (out_dtype or q.dtype).itemsize
    return q.numel() * q.element_size() + out


def attention_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the bytes of queries, keys, values and results, each counted once."""
    return query_bytes(q, v.shape[-1]) + sum(x.numel() * x.element_size() for x in (k, v))
