# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.decode``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Scalar, Tensor, TraceTemplate, Var
from .attention_reference import attention_reference, paged_attention_reference
from .attention_shared import (
    PAGE_TABLE,
    _single_check,
    by_layout_and_lse,
    by_wrapper,
    cache_inputs,
    heads,
    paged_axes,
)
from .gqa import gqa_paged_decode_trace
from .shared import normal, seeded

__all__ = ["batch_decode_trace", "single_decode_trace", "single_decode_with_kv_cache_trace"]


def _single_decode_lse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: int,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if heads_first:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = attention_reference(q[None], k, v, False, window_left, logits_soft_cap, sm_scale)
    return out[0], lse[0]


def _single_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: int,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    return _single_decode_lse_reference(q, k, v, heads_first, window_left, logits_soft_cap, sm_scale)[0]


def _single_decode_with_kv_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    return _single_decode_lse_reference(q, k, v, 0, window_left, logits_soft_cap, sm_scale)[0]


def _single_decode_with_kv_cache_init(
    *,
    kv_len: int,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "q": normal(g, num_qo_heads, head_dim),
        "k": normal(g, kv_len, num_kv_heads, head_dim),
        "v": normal(g, kv_len, num_kv_heads, head_dim),
    }


single_decode_with_kv_cache_trace = template_of_text(
    "single_decode_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}",
    "single_decode",
    var="kv_len",
    inputs="q[num_qo_heads, head_dim]; k[kv_len, num_kv_heads, head_dim]; v[kv_len, num_kv_heads, head_dim]",
    outputs="output[num_qo_heads, head_dim]=q",
    reference=_single_decode_with_kv_cache_reference,
    init=_single_decode_with_kv_cache_init,
    check=_single_check,
    description="Attention of one query token over the keys of its request.",
)


def _single_decode(layout: str, return_lse: bool) -> TraceTemplate:
    rows = ("kv_len", "num_kv_heads", "head_dim") if layout == "NHD" else ("num_kv_heads", "kv_len", "head_dim")
    out = {"out": Tensor(("num_qo_heads", "head_dim"), dtype_from="q")}
    lse = {"lse": Tensor(("num_qo_heads",), dtype="float32", description="log2 of the sum of exp(logit)")}
    return TraceTemplate(
        "single_decode",
        axes={**heads(layout), "kv_len": Var()},
        inputs={
            "q": Tensor(("num_qo_heads", "head_dim")),
            "k": Tensor(rows),
            "v": Tensor(rows),
            "window_left": Scalar("int32", optional=True),
            "logits_soft_cap": Scalar(optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={**out, **(lse if return_lse else {})},
        name_prefix=f"single_decode_{layout.lower()}{'_lse' if return_lse else ''}",
        reference=_single_decode_lse_reference if return_lse else _single_decode_reference,
        description="Attention of one query token over the keys of its request.",
    )


def _batch_decode_reference(
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    heads_first: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    k_cache, v_cache = paged_kv_cache.unbind(1)
    return _batch_decode_pair_reference(
        q, k_cache, v_cache, heads_first, kv_indptr, kv_indices, kv_last_page_len, sm_scale
    )


def _batch_decode_pair_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    batch_size = len(kv_last_page_len)
    qo_indptr = torch.arange(batch_size + 1) * (q.shape[0] // max(batch_size, 1))
    return paged_attention_reference(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, True, sm_scale, heads_first
    )


def _batch_decode(layout: str, pair: bool) -> TraceTemplate:
    return TraceTemplate(
        "batch_decode",
        axes={**paged_axes(layout, pair), "num_rows": Var("batch_size * q_len_per_req")},
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            **cache_inputs(layout, pair),
            **PAGE_TABLE,
            "sm_scale": Scalar(optional=True),
        },
        outputs={"o": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="q")},
        name_prefix=f"batch_decode_paged_{layout.lower()}{'_pair' if pair else ''}",
        reference=_batch_decode_pair_reference if pair else _batch_decode_reference,
        description="Attention of one query token, or a few, of each request over its pages.",
    )


single_decode_trace = by_layout_and_lse(_single_decode, single_decode_with_kv_cache_trace)
batch_decode_trace = by_wrapper(_batch_decode, published=gqa_paged_decode_trace)
