# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.mla.sparse_mla``: attention to the cached rows that indices name."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..notation import template_of_text
from .shared import normal, randint, seeded

__all__ = ["sparse_mla_trace"]


def _sparse_mla_rows(kv_cache: torch.Tensor, kv_scale: Optional[float]) -> torch.Tensor:
    """Return the rows of a cache as float64 values."""
    rows = kv_cache.reshape(-1, kv_cache.shape[-1])
    if kv_cache.dtype is not torch.uint8:
        return rows.double() * (1.0 if kv_scale is None else kv_scale)
    latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    rotary = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent * scales.repeat_interleave(128, 1), rotary), 1)


def _sparse_mla_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    lengths: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    kv_scale: Optional[float] = None,
    return_lse_base_on_e: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute output and LSE in float64."""
    keys = _sparse_mla_rows(kv_cache, kv_scale)
    place = torch.arange(indices.shape[1], device=q.device)[None, :]
    counts = indices >= 0
    if lengths is not None:
        counts = counts & (place < lengths[:, None])
    used = keys[torch.where(counts, indices, 0).long()] if len(keys) else keys.new_zeros(*indices.shape, keys.shape[1])
    logits = torch.einsum("thd,tkd->thk", q.double(), used) * sm_scale
    logits = logits.masked_fill(~counts[:, None, :], -math.inf)
    if sinks is not None:
        more = sinks.double()[None, :, None].expand(len(q), -1, 1)
        logits = torch.cat((logits, more), 2)
        used = torch.cat((used, used.new_zeros(len(q), 1, used.shape[2])), 1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = torch.einsum("thk,tkd->thd", weights, used[..., :512])
    return out.to(q.dtype), (lse if return_lse_base_on_e else lse / math.log(2)).float()


def _sparse_mla_init(
    *,
    num_tokens: int,
    num_heads: int = 16,
    head_dim: int = 576,
    page_size: int = 64,
    num_pages: int = 0,
    top_k: int = 128,
    row_size: int = 576,
    head_dim_v: int = 512,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Indices of different rows, an eighth of them -1. ``head_dim_v`` is what the op gives, whatever it is here."""
    g = seeded(seed, device)
    pages = max(num_pages, -(-2 * top_k // page_size), 1)
    order = torch.rand(num_tokens, pages * page_size, generator=g, device=device).argsort(1)[:, :top_k].int()
    is_none = randint(g, 8, num_tokens, top_k) == 0
    return {
        "q": normal(g, num_tokens, num_heads, head_dim),
        "kv_cache": normal(g, pages, page_size, row_size),
        "indices": torch.where(is_none, -1, order),
        "sm_scale": 192**-0.5,
    }


sparse_mla_trace = template_of_text(
    "sparse_mla_h{num_heads}_d{head_dim}_ps{page_size}",
    "sparse_mla",
    var="num_tokens num_pages top_k row_size head_dim_v",
    inputs="q[num_tokens, num_heads, head_dim]; kv_cache[num_pages, page_size, row_size]; indices[num_tokens, top_k];"
    "sm_scale:float32; lengths[num_tokens]:int32?; sinks[num_heads]:float32?; kv_scale:float32?; return_lse:int32?;"
    "return_lse_base_on_e:int32?",
    outputs="output[num_tokens, num_heads, head_dim_v]=q; lse[num_tokens, num_heads]:float32?",
    notes={
        "kv_cache": "rows of head_dim numbers, or 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16",
        "indices": "page * page_size + slot; -1 names no row",
        "lengths": "indices of each token that count",
        "sinks": "one more logit of each head, without a value",
    },
    reference=_sparse_mla_reference,
    init=_sparse_mla_init,
    description="Attention of each token to the rows of a latent cache that its indices name.",
)
