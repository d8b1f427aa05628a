# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.prefill``."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference, paged_attention_reference, ragged_attention_reference
from .attention_shared import (
    PAGE_TABLE,
    QO_INDPTR,
    _single_check,
    by_layout_and_lse,
    by_wrapper,
    cache_inputs,
    heads,
    keys_of_request,
    paged_axes,
)
from .gqa import gqa_paged_prefill_trace, gqa_ragged_prefill_trace
from .shared import normal, seeded

__all__ = [
    "paged_prefill_ranges_trace",
    "paged_prefill_trace",
    "ragged_prefill_trace",
    "single_prefill_trace",
    "single_prefill_with_kv_cache_trace",
]


def _single_prefill_lse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: int,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if heads_first:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return attention_reference(q, k, v, causal, window_left, logits_soft_cap, sm_scale)


def _single_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: int,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    return _single_prefill_lse_reference(q, k, v, heads_first, causal, sm_scale, window_left, logits_soft_cap)[0]


def _single_prefill_with_kv_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    """Causal unless told otherwise, as the arguments of ``init`` are; the definition has no such input."""
    return _single_prefill_lse_reference(q, k, v, 0, causal, sm_scale, window_left, logits_soft_cap)[0]


def _single_prefill_with_kv_cache_init(
    *,
    qo_len: int,
    kv_len: int = 256,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "q": normal(g, qo_len, num_qo_heads, head_dim),
        "k": normal(g, kv_len, num_kv_heads, head_dim),
        "v": normal(g, kv_len, num_kv_heads, head_dim),
        "causal": True,
    }


single_prefill_with_kv_cache_trace = template_of_text(
    "single_prefill_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}",
    "single_prefill",
    var="qo_len kv_len",
    inputs="q[qo_len, num_qo_heads, head_dim]; k[kv_len, num_kv_heads, head_dim]; v[kv_len, num_kv_heads, head_dim]",
    outputs="output[qo_len, num_qo_heads, head_dim]=q",
    reference=_single_prefill_with_kv_cache_reference,
    init=_single_prefill_with_kv_cache_init,
    check=_single_check,
    description="Causal attention of the last tokens of one request over its keys.",
)


def _axes(layout: str) -> dict[str, Axis]:
    return {**heads(layout), "head_dim_vo": Const("of v and the output", abbrev="dv")}


def _single_prefill(layout: str, return_lse: bool) -> TraceTemplate:
    out = {"out": Tensor(("qo_len", "num_qo_heads", "head_dim_vo"), dtype_from="q")}
    lse = {"lse": Tensor(("qo_len", "num_qo_heads"), dtype="float32", description="log2 of the sum of exp(logit)")}
    return TraceTemplate(
        "single_prefill",
        axes={**_axes(layout), "qo_len": Var(), "kv_len": Var()},
        inputs={
            "q": Tensor(("qo_len", "num_qo_heads", "head_dim")),
            "k": keys_of_request(layout, "kv_len", "head_dim"),
            "v": keys_of_request(layout, "kv_len", "head_dim_vo"),
            "causal": Scalar("bool", optional=True),
            "sm_scale": Scalar(optional=True),
            "window_left": Scalar("int32", optional=True),
            "logits_soft_cap": Scalar(optional=True),
        },
        outputs={**out, **(lse if return_lse else {})},
        name_prefix=f"single_prefill_{layout.lower()}{'_lse' if return_lse else ''}",
        reference=_single_prefill_lse_reference if return_lse else _single_prefill_reference,
        description="Attention of the last tokens of one request over its keys.",
    )


def _paged_prefill_reference(
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    k_cache, v_cache = paged_kv_cache.unbind(1)
    return paged_attention_reference(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, causal, sm_scale, heads_first
    )


def _paged_prefill_pair_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    return paged_attention_reference(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, causal, sm_scale, heads_first
    )


def _paged_prefill(layout: str, pair: bool) -> TraceTemplate:
    return TraceTemplate(
        "batch_prefill",
        axes={**paged_axes(layout, pair), "num_rows": Var("query tokens of all requests")},
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            **cache_inputs(layout, pair),
            "qo_indptr": QO_INDPTR,
            **PAGE_TABLE,
            "causal": Scalar("bool", optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"o": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="q")},
        name_prefix=f"batch_prefill_paged_{layout.lower()}{'_pair' if pair else ''}",
        reference=_paged_prefill_pair_reference if pair else _paged_prefill_reference,
        description="Attention of the last tokens of each request over its pages.",
    )


def _ragged_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    if heads_first:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return ragged_attention_reference(q, k, v, qo_indptr, kv_indptr, causal, sm_scale)


def _ragged_prefill(layout: str) -> TraceTemplate:
    return TraceTemplate(
        "batch_prefill",
        axes={
            **_axes(layout),
            "num_rows": Var("query tokens of all requests"),
            "num_keys": Var("keys of all requests"),
            "indptr_len": Var("batch_size + 1"),
        },
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            "k": keys_of_request(layout, "num_keys", "head_dim"),
            "v": keys_of_request(layout, "num_keys", "head_dim_vo"),
            "qo_indptr": QO_INDPTR,
            "kv_indptr": Tensor(
                ("indptr_len",), dtype="int32", optional=True, description="where each request's keys begin"
            ),
            "causal": Scalar("bool", optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"o": Tensor(("num_rows", "num_qo_heads", "head_dim_vo"), dtype_from="q")},
        name_prefix=f"batch_prefill_ragged_{layout.lower()}",
        reference=_ragged_prefill_reference,
        description="Attention of the last tokens of each request over its keys.",
    )


_RAGGED = {layout: _ragged_prefill(layout) for layout in ("NHD", "HND")}


def _choose_ragged(**arguments: Any) -> TraceTemplate:
    """The published definition has values as wide as keys, heads last but one."""
    layout = getattr(arguments.get("self"), "_kv_layout", "NHD")
    k, v = (getattr(arguments.get(name), "shape", (0,))[-1:] for name in ("k", "v"))
    return gqa_ragged_prefill_trace if layout == "NHD" and k == v else _RAGGED[layout]


def _ranges_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    ranges: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: Optional[float] = None,
    window_left: Optional[int] = None,
    **_: Any,
) -> torch.Tensor:
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    qo, pages, last = qo_indptr.tolist(), kv_indptr.tolist(), kv_last_page_len.tolist()
    for i in range(len(qo) - 1):
        mine = kv_indices[pages[i] : pages[i + 1]].long()
        kv_len = (len(mine) - 1) * k_cache.shape[1] + last[i] if len(mine) else 0
        rows = slice(qo[i], qo[i + 1])
        k, v = (cache[mine].flatten(0, 1)[:kv_len].float() for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(q.shape[1] // k_cache.shape[2], dim=1) for x in (k, v))
        key = torch.arange(kv_len, device=q.device)
        position = torch.arange(kv_len - (qo[i + 1] - qo[i]), kv_len, device=q.device)[:, None]
        first, end = ranges[rows].long().split(1, dim=1)
        visible = (key <= position) | ((key >= first) & (key <= end))
        if window_left is not None and window_left >= 0:
            visible &= (key - position).abs() <= window_left
        logits = torch.einsum("qhd,khd->hqk", q[rows].float(), k)
        logits = logits * (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
        logits = logits.masked_fill(~visible, -math.inf)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def _ranges_combined_reference(
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    heads_first: int,
    ranges: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: Optional[float] = None,
    window_left: Optional[int] = None,
    **_: Any,
) -> torch.Tensor:
    tables = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    k_cache, v_cache = paged_kv_cache.unbind(1)
    return _ranges_reference(q, k_cache, v_cache, heads_first, ranges, *tables, sm_scale, window_left)


def _paged_ranges(layout: str, pair: bool) -> TraceTemplate:
    return TraceTemplate(
        "batch_prefill",
        axes={**paged_axes(layout, pair), "num_rows": Var("query tokens of all requests"), "ends": Const(value=2)},
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            **cache_inputs(layout, pair),
            "ranges": Tensor(("num_rows", "ends"), dtype="int32", description="first and last key seen besides"),
            "qo_indptr": QO_INDPTR,
            **PAGE_TABLE,
            "sm_scale": Scalar(optional=True),
            "window_left": Scalar("int32", optional=True),
        },
        outputs={"o": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="q")},
        name_prefix=f"batch_prefill_ranges_{layout.lower()}{'_pair' if pair else ''}",
        reference=_ranges_reference if pair else _ranges_combined_reference,
        description="Causal attention of the last tokens of each request, which see a range of keys on both sides too.",
    )


single_prefill_trace = by_layout_and_lse(_single_prefill, single_prefill_with_kv_cache_trace)
paged_prefill_ranges_trace = by_wrapper(_paged_ranges)
paged_prefill_trace = by_wrapper(_paged_prefill, published=gqa_paged_prefill_trace)
ragged_prefill_trace = TraceDispatch(_choose_ragged, (gqa_ragged_prefill_trace, *_RAGGED.values()))
