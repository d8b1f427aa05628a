# SPDX-License-Identifier: Apache-2.0
"""References of attention that templates of all its forms share: float32, whole matrices of logits."""

from __future__ import annotations

import math
from typing import Optional

import torch

__all__ = [
    "attention_reference",
    "paged_attention_reference",
    "paged_states_reference",
    "ragged_attention_reference",
]


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request, ``[tokens, heads, head_dim]``: output in the dtype of q, and the base-2 LSE."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys)
    logits = logits * (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    position = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0], device=q.device)
    if causal:
        logits = logits.masked_fill(key > position, -math.inf)
    if window_left >= 0:
        logits = logits.masked_fill(key < position - window_left, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out.to(q.dtype), (lse / math.log(2)).T.contiguous()


def ragged_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    sm_scale: Optional[float],
) -> torch.Tensor:
    """Requests whose queries and keys lie one after the other."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(qo) - 1):
        rows, keys = slice(qo[i], qo[i + 1]), slice(kv[i], kv[i + 1])
        out[rows] = attention_reference(q[rows], k[keys], v[keys], causal, sm_scale=sm_scale)[0]
    return out


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal: bool,
    sm_scale: Optional[float],
    heads_first: int,
) -> torch.Tensor:
    """Requests whose keys are gathered from pages."""
    return paged_states_reference(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, causal, sm_scale, heads_first
    )[0]


def paged_states_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal: bool,
    sm_scale: Optional[float],
    heads_first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the base-2 LSE."""
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    page_size = k_cache.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    qo, pages = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(qo) - 1):
        mine = kv_indices[pages[i] : pages[i + 1]].long()
        kv_len = (len(mine) - 1) * page_size + int(kv_last_page_len[i]) if len(mine) else 0
        k, v = (cache[mine].flatten(0, 1)[:kv_len] for cache in (k_cache, v_cache))
        rows = slice(qo[i], qo[i + 1])
        out[rows], lse[rows] = attention_reference(q[rows], k, v, causal, sm_scale=sm_scale)
    return out, lse
