# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.sparse``."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var

__all__ = ["block_sparse_trace", "variable_block_sparse_trace"]


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


def _block_sparse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    R: int,
    C: int,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    mask = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    offsets, columns = indptr.tolist(), indices.tolist()
    for row in range(len(offsets) - 1):
        for column in columns[offsets[row] : offsets[row + 1]]:
            mask[row * R : (row + 1) * R, column * C : (column + 1) * C] = True
    out = _masked_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, sm_scale)
    return out.transpose(0, 1).contiguous()


def _variable_block_sparse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask_map: torch.Tensor,
    block_row_sz: torch.Tensor,
    block_col_sz: torch.Tensor,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    group = q.shape[0] // k.shape[0]
    masks = [
        pattern.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
        for pattern, rows, columns in zip(block_mask_map, block_row_sz, block_col_sz, strict=True)
    ]
    return _masked_attention(q, k, v, torch.stack(masks).repeat_interleave(group, dim=0), sm_scale)


_HEADS: dict[str, Axis] = {
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
    "qo_len": Var(),
    "kv_len": Var(),
}

block_sparse_trace = TraceTemplate(
    "block_sparse",
    axes={**_HEADS, "indptr_len": Var("rows of blocks + 1"), "nnz": Var("blocks")},
    inputs={
        "q": Tensor(("qo_len", "num_qo_heads", "head_dim")),
        "k": Tensor(("kv_len", "num_kv_heads", "head_dim")),
        "v": Tensor(("kv_len", "num_kv_heads", "head_dim")),
        "indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="blocks of each row of blocks"),
        "indices": Tensor(("nnz",), dtype="int32", optional=True, description="columns of the blocks"),
        "R": Scalar("int32", optional=True, description="queries of a block"),
        "C": Scalar("int32", optional=True, description="keys of a block"),
        "sm_scale": Scalar(optional=True),
    },
    outputs={"o": Tensor(("qo_len", "num_qo_heads", "head_dim"), dtype_from="q")},
    reference=_block_sparse_reference,
    description="Attention where only listed blocks of queries and keys are computed.",
)

variable_block_sparse_trace = TraceTemplate(
    "variable_block_sparse",
    axes={**_HEADS, "block_rows": Var("blocks of queries"), "block_columns": Var("blocks of keys")},
    inputs={
        "q": Tensor(("num_qo_heads", "qo_len", "head_dim")),
        "k": Tensor(("num_kv_heads", "kv_len", "head_dim")),
        "v": Tensor(("num_kv_heads", "kv_len", "head_dim")),
        "block_mask_map": Tensor(("num_kv_heads", "block_rows", "block_columns"), dtype="bool", optional=True),
        "block_row_sz": Tensor(("num_kv_heads", "block_rows"), dtype="int32", optional=True),
        "block_col_sz": Tensor(("num_kv_heads", "block_columns"), dtype="int32", optional=True),
        "sm_scale": Scalar(optional=True),
    },
    outputs={"o": Tensor(("num_qo_heads", "qo_len", "head_dim"), dtype_from="q")},
    reference=_variable_block_sparse_reference,
    description="Attention where each head has blocks of its own, and a list of those that are computed.",
)
