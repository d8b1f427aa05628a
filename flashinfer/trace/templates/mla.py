# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.mla``: all heads share one key, whose first part is the value."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_shared import PAGE_TABLE
from .shared import even_indptr, normal, seeded

__all__ = ["mla_decode_trace", "mla_paged_decode_trace", "mla_paged_reference", "mla_run_trace"]


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
    table = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    return mla_states_reference(q_nope, q_pe, ckv_cache, kpe_cache, *table, causal, sm_scale)[0]


def mla_states_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the base-2 LSE."""
    out = torch.zeros_like(q_nope)
    states = torch.full(q_nope.shape[:2], -math.inf, device=q_nope.device)
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
        states[mine] = lse[..., 0].T / math.log(2)
    return out, states


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
    "num_pages": Var(),
    "indptr_len": Var("batch_size + 1"),
    "num_indices": Var("pages of all requests"),
    "batch_size": Var(),
}


def _dequantized(cache: torch.Tensor, scale: Optional[float], scale_arr: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Values of a cache of 8-bit floats: times a number, or times a number for each group of columns of a token."""
    values = cache.float()
    if scale_arr is not None:
        values = values * scale_arr.float().repeat_interleave(values.shape[-1] // scale_arr.shape[-1], dim=-1)
    return values if scale is None else values * scale


def _mla_paged_decode_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: Optional[float],
    ckv_scale: Optional[float] = None,
    ckv_scale_arr: Optional[torch.Tensor] = None,
    kpe_scale: Optional[float] = None,
    return_lse: bool = False,
    qo_indptr: Optional[torch.Tensor] = None,
    kv_len_arr: Optional[torch.Tensor] = None,
    causal: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 LSE. What the definition does not say is one row for each request, and full pages."""
    if qo_indptr is None:
        qo_indptr = torch.arange(len(kv_indptr))
    if kv_len_arr is None:
        kv_len_arr = kv_indptr.diff() * ckv_cache.shape[1]
    if sm_scale is None:
        sm_scale = 1 / math.sqrt(128 + q_pe.shape[-1])  # scale of the heads before the compression
    caches = (_dequantized(ckv_cache, ckv_scale, ckv_scale_arr), _dequantized(kpe_cache, kpe_scale))
    table = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    return mla_states_reference(q_nope, q_pe, *caches, *table, causal, sm_scale)


def _mla_paged_decode_init(
    *,
    batch_size: int,
    num_qo_heads: int = 16,
    head_dim_ckv: int = 512,
    head_dim_kpe: int = 64,
    page_size: int = 64,
    num_pages: int = 0,
    num_pages_per_seq: int = 4,
    len_indptr: int = 0,
    num_kv_indices: int = 0,
    ckv_scale_groups: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, used = seeded(seed, device), num_kv_indices or batch_size * num_pages_per_seq
    num_pages, kv_indptr = max(num_pages, used), even_indptr(used, batch_size, device)
    return {
        "plan": {
            "qo_indptr": torch.arange(batch_size + 1, dtype=torch.int32, device=device),
            "kv_indptr": kv_indptr,
            "kv_indices": torch.randperm(num_pages, generator=g, device=device)[:used].int(),
            "kv_len_arr": kv_indptr.diff() * page_size,
            "num_heads": num_qo_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
            "causal": False,
            "sm_scale": 1 / math.sqrt(128 + head_dim_kpe),
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        },
        "run": {
            "q_nope": normal(g, batch_size, num_qo_heads, head_dim_ckv),
            "q_pe": normal(g, batch_size, num_qo_heads, head_dim_kpe),
            "ckv_cache": normal(g, num_pages, page_size, head_dim_ckv),
            "kpe_cache": normal(g, num_pages, page_size, head_dim_kpe),
        },
    }


mla_paged_decode_trace = template_of_text(
    "mla_paged_decode_h{num_qo_heads}_ckv{head_dim_ckv}_kpe{head_dim_kpe}_ps{page_size}",
    "mla_paged",
    var="batch_size ckv_scale_groups num_pages len_indptr num_kv_indices",
    inputs="q_nope[batch_size, num_qo_heads, head_dim_ckv]; q_pe[batch_size, num_qo_heads, head_dim_kpe];"
    "ckv_cache[num_pages, page_size, head_dim_ckv]; kpe_cache[num_pages, page_size, head_dim_kpe];"
    "kv_indptr[len_indptr]:int32?; kv_indices[num_kv_indices]:int32?; sm_scale:float32?; ckv_scale:float32?;"
    "ckv_scale_arr[num_pages, page_size, ckv_scale_groups]:float32?; kpe_scale:float32?; return_lse:int32?",
    outputs="output[batch_size, num_qo_heads, head_dim_ckv]=q_nope; lse[batch_size, num_qo_heads]:float32?",
    notes={"kv_indptr": "where the pages of each request begin", "kv_indices": "pages of all requests"},
    reference=_mla_paged_decode_reference,
    init=_mla_paged_decode_init,
    constraints=["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    description="Latent attention: one key for all heads, whose first part is the value too.",
)


def _mla_packed_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: Optional[float],
    ckv_scale: Optional[float] = None,
    kpe_scale: Optional[float] = None,
    return_lse: bool = False,
    head_dim_ckv: int = 512,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries = query[..., :head_dim_ckv], query[..., head_dim_ckv:]
    caches = kv_cache[..., :head_dim_ckv], kv_cache[..., head_dim_ckv:]
    return _mla_paged_decode_reference(
        *queries, *caches, kv_indptr, kv_indices, sm_scale, ckv_scale, None, kpe_scale, **_
    )


_TABLE = (
    "kv_indptr[len_indptr]:int32?; kv_indices[num_kv_indices]:int32?; sm_scale:float32?; ckv_scale:float32?;"
    "kpe_scale:float32?; return_lse:int32?"
)

_mla_pairs_trace = template_of_text(
    "mla_paged_pairs_h{num_qo_heads}_ckv{head_dim_ckv}_kpe{head_dim_kpe}_ps{page_size}",
    "mla_paged",
    var="batch_size num_pages len_indptr num_kv_indices",
    inputs="q_nope[batch_size, num_qo_heads, head_dim_ckv]<-query[0];"
    "q_pe[batch_size, num_qo_heads, head_dim_kpe]<-query[1];"
    "ckv_cache[num_pages, page_size, head_dim_ckv]<-kv_cache[0];"
    f"kpe_cache[num_pages, page_size, head_dim_kpe]<-kv_cache[1]; {_TABLE}",
    outputs="output[batch_size, num_qo_heads, head_dim_ckv]=q_nope; lse[batch_size, num_qo_heads]:float32?",
    reference=_mla_paged_decode_reference,
    constraints=["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    description="Latent attention whose queries and cache are pairs of tensors.",
)

_mla_packed_trace = template_of_text(
    "mla_paged_packed_h{num_qo_heads}_d{head_dim}_ps{page_size}",
    "mla_paged",
    var="batch_size num_pages len_indptr num_kv_indices head_dim_ckv",
    inputs="query[batch_size, num_qo_heads, head_dim]; kv_cache[num_pages, page_size, head_dim];" + _TABLE,
    outputs="output[batch_size, num_qo_heads, head_dim_ckv]=query; lse[batch_size, num_qo_heads]:float32?",
    reference=_mla_packed_reference,
    constraints=["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    description="Latent attention whose queries and cache have the columns of both parts in one tensor.",
)


def _choose_mla(query: Any = None, kv_cache: Any = None, **_: Any) -> TraceTemplate:
    if query is None and kv_cache is None:
        return mla_paged_decode_trace
    return _mla_packed_trace if isinstance(query, torch.Tensor) else _mla_pairs_trace


mla_run_trace = TraceDispatch(_choose_mla, (mla_paged_decode_trace, _mla_pairs_trace, _mla_packed_trace))

mla_decode_trace = TraceTemplate(
    "mla_paged",
    axes=_AXES,
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
