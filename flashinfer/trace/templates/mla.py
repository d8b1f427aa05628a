# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.mla``: all heads share one key, whose first part is the value."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var
from .attention_shared import PAGE_TABLE

__all__ = ["mla_decode_trace", "mla_paged_reference", "mla_paged_trace"]


def mla_paged_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    **_: Any,
) -> torch.Tensor:
    out = torch.zeros_like(q_nope)
    page_size = ckv_cache.shape[1]
    rows, pages = qo_indptr.tolist(), kv_indptr.tolist()
    for i, kv_len in enumerate(kv_len_arr.tolist()):
        mine = slice(rows[i], rows[i + 1])
        count = -(-kv_len // page_size)
        index = kv_indices[pages[i] : pages[i] + count].long()
        ckv, kpe = (cache[index].flatten(0, 1)[:kv_len].float() for cache in (ckv_cache, kpe_cache))
        logits = torch.einsum("qhd,kd->hqk", q_nope[mine].float(), ckv)
        logits = (logits + torch.einsum("qhd,kd->hqk", q_pe[mine].float(), kpe)) * sm_scale
        if causal:
            qo_len = rows[i + 1] - rows[i]
            position = torch.arange(qo_len, device=logits.device)[:, None] + kv_len - qo_len
            logits = logits.masked_fill(torch.arange(kv_len, device=logits.device) > position, -math.inf)
        lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0))
        out[mine] = torch.einsum("hqk,kd->qhd", weights, ckv).to(out.dtype)
    return out


def _mla_decode_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    paged_ckv_cache: torch.Tensor,
    paged_kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    **_: Any,
) -> torch.Tensor:
    counts = kv_indptr[1:] - kv_indptr[:-1]
    full = (counts - 1) * paged_ckv_cache.shape[1]
    kv_len_arr = torch.where(counts > 0, full + kv_last_page_len, 0)
    qo_indptr = torch.arange(len(counts) + 1)
    caches = (paged_ckv_cache, paged_kpe_cache)
    return mla_paged_reference(q_nope, q_pe, *caches, qo_indptr, kv_indptr, kv_indices, kv_len_arr, False, sm_scale)


_AXES: dict[str, Axis] = {
    "num_heads": Const(abbrev="h"),
    "head_dim_ckv": Const(abbrev="ckv"),
    "head_dim_kpe": Const(abbrev="kpe"),
    "page_size": Const(abbrev="ps"),
    "num_rows": Var(),
    "num_pages": Var(),
    "indptr_len": Var("batch_size + 1"),
    "num_indices": Var("pages of all requests"),
    "batch_size": Var(),
}

mla_paged_trace = TraceTemplate(
    "mla_paged",
    axes=_AXES,
    inputs={
        "q_nope": Tensor(("num_rows", "num_heads", "head_dim_ckv")),
        "q_pe": Tensor(("num_rows", "num_heads", "head_dim_kpe")),
        "ckv_cache": Tensor(("num_pages", "page_size", "head_dim_ckv")),
        "kpe_cache": Tensor(("num_pages", "page_size", "head_dim_kpe")),
        "qo_indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="rows of each request"),
        "kv_indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="where its pages begin"),
        "kv_indices": Tensor(("num_indices",), dtype="int32", optional=True, description="pages of all requests"),
        "kv_len_arr": Tensor(("batch_size",), dtype="int32", optional=True, description="keys of each request"),
        "causal": Scalar("bool", optional=True),
        "sm_scale": Scalar(optional=True),
    },
    outputs={"output": Tensor(("num_rows", "num_heads", "head_dim_ckv"), dtype_from="q_nope")},
    reference=mla_paged_reference,
    description="Latent attention: one key for all heads, whose first part is the value too.",
)

mla_decode_trace = TraceTemplate(
    "mla_paged",
    axes={axis: kind for axis, kind in _AXES.items() if axis != "num_rows"},
    inputs={
        "q_nope": Tensor(("batch_size", "num_heads", "head_dim_ckv")),
        "q_pe": Tensor(("batch_size", "num_heads", "head_dim_kpe")),
        "paged_ckv_cache": Tensor(("num_pages", "page_size", "head_dim_ckv")),
        "paged_kpe_cache": Tensor(("num_pages", "page_size", "head_dim_kpe")),
        **PAGE_TABLE,
        "sm_scale": Scalar(optional=True),
    },
    outputs={"o": Tensor(("batch_size", "num_heads", "head_dim_ckv"), dtype_from="q_nope")},
    name_prefix="mla_decode_paged",
    reference=_mla_decode_reference,
    description="Latent attention of one token per request: one key for all heads, whose first part is the value too.",
)
