# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of attention share: a paged batch, the baseline of torch, the work of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness import rand
from torch.nn.functional import scaled_dot_product_attention

from flashinfer.testing import attention_flops

__all__ = ["PagedBatch", "attention_bytes", "attention_flops", "torch_attention", "workspace"]


def workspace() -> torch.Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8)


@dataclass
class PagedBatch:
    """Requests of equal length on shuffled pages; ``k`` and ``v`` are the same keys and values gathered for torch."""

    batch_size: int
    s_kv: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        each = -(-self.s_kv // self.page_size)
        count = each * self.batch_size
        self.k_cache = rand(count, self.page_size, self.num_kv_heads, self.head_dim_qk, self.dtype)
        self.v_cache = rand(count, self.page_size, self.num_kv_heads, self.head_dim_vo, self.dtype)
        self.indices = torch.randperm(count).int()
        self.indptr = torch.arange(self.batch_size + 1).int() * each
        self.last_page_len = torch.full((self.batch_size,), (self.s_kv - 1) % self.page_size + 1).int()
        self.k, self.v = (self._gathered(cache) for cache in (self.k_cache, self.v_cache))

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        """``[batch_size, heads, tokens, head_dim]``, as torch likes it best."""
        rows = cache[self.indices.long()].view(self.batch_size, -1, *cache.shape[2:])[:, : self.s_kv]
        return rows.transpose(1, 2).contiguous()


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """``q`` is ``[batch * tokens, heads, head_dim]``, keys ``[batch, heads, tokens, head_dim]``.

    One query per request is a matrix product of the heads that share keys: torch reads each key once that way.
    """
    batch_size, num_kv_heads, s_kv, _ = k.shape
    if q.shape[0] == batch_size:
        return scaled_dot_product_attention(q.view(batch_size, num_kv_heads, -1, q.shape[-1]), k, v).view(
            batch_size, q.shape[1], -1
        )
    q = q.view(batch_size, -1, *q.shape[1:]).transpose(1, 2)
    mask = None
    if causal and q.shape[2] != s_kv:
        mask = torch.ones(q.shape[2], s_kv, dtype=torch.bool, device=q.device).tril(s_kv - q.shape[2])
    is_causal = causal and mask is None
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def attention_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Queries, keys, values and results once each."""
    out = q.numel() // q.shape[-1] * v.shape[-1] * q.element_size()
    return sum(x.numel() * x.element_size() for x in (q, k, v)) + out
