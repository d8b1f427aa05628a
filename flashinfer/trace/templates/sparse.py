# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.sparse``."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from ..notation import template_of_text
from ..template import TraceTemplate
from .attention_reference import attention_reference
from .shared import normal, seeded

__all__ = ["block_sparse_attention_run_trace", "variable_block_sparse_attention_run_trace"]


def _masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sm_scale: Optional[float]
) -> torch.Tensor:
    """Heads first; ``mask`` is ``[rows, keys]`` or has heads too. Rows that see nothing are 0."""
    group = q.shape[0] // k.shape[0]
    keys, values = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    logits = torch.einsum("hqd,hkd->hqk", q.float(), keys)
    logits = logits * (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
    logits = logits.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0))
    return torch.einsum("hqk,hkd->hqd", weights, values).to(q.dtype)


def _block_sparse_attention_run_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indptr: Optional[torch.Tensor] = None,
    indices: Optional[torch.Tensor] = None,
    R: int = 1,
    C: int = 1,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    """Without the arguments of plan, every query sees every key."""
    if indptr is None or indices is None:
        return attention_reference(q, k, v, sm_scale=sm_scale)[0]
    mask = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    offsets, columns = indptr.tolist(), indices.tolist()
    for row in range(len(offsets) - 1):
        for column in columns[offsets[row] : offsets[row + 1]]:
            mask[row * R : (row + 1) * R, column * C : (column + 1) * C] = True
    out = _masked_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, sm_scale)
    return out.transpose(0, 1).contiguous()


def _variable_block_sparse_attention_run_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask_map: Optional[torch.Tensor] = None,
    block_row_sz: Optional[torch.Tensor] = None,
    block_col_sz: Optional[torch.Tensor] = None,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    """With the arguments of plan the tensors are those of the API, heads first.

    Without them, they are those of the published definition, tokens first, and every query sees every key.
    """
    if block_mask_map is None or block_row_sz is None or block_col_sz is None:
        return attention_reference(q, k, v, sm_scale=sm_scale)[0]
    group = q.shape[0] // k.shape[0]
    masks = [
        pattern.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
        for pattern, rows, columns in zip(block_mask_map, block_row_sz, block_col_sz, strict=True)
    ]
    return _masked_attention(q, k, v, torch.stack(masks).repeat_interleave(group, dim=0), sm_scale)


def _block_sparse_attention_run_init(
    *,
    qo_len: int = 32,
    kv_len: int = 32,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, keys = seeded(seed, device), (kv_len, num_kv_heads, head_dim)
    return {
        "q": normal(g, qo_len, num_qo_heads, head_dim, dtype=torch.float16),
        "k": normal(g, *keys, dtype=torch.float16),
        "v": normal(g, *keys, dtype=torch.float16),
    }


def _published(stem: str, prefix: str, reference: Callable[..., Any], description: str) -> TraceTemplate:
    return template_of_text(
        prefix + "_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}",
        "block_sparse",
        var="qo_len kv_len",
        inputs="q[qo_len, num_qo_heads, head_dim]; k[kv_len, num_kv_heads, head_dim];v[kv_len, num_kv_heads, head_dim]",
        outputs="output[qo_len, num_qo_heads, head_dim]=q",
        reference=reference,
        init=_block_sparse_attention_run_init,
        stem=stem,
        description=description,
    )


block_sparse_attention_run_trace = _published(
    "block_sparse_attention_run",
    "block_sparse_run",
    _block_sparse_attention_run_reference,
    "Attention where only listed blocks of queries and keys are computed.",
)
variable_block_sparse_attention_run_trace = _published(
    "variable_block_sparse_attention_run",
    "var_block_sparse_run",
    _variable_block_sparse_attention_run_reference,
    "Attention where each head has blocks of its own; dimensions are named as in the published definition, though the "
    "API has heads first.",
)
