# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.BatchAttention``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference
from .attention_shared import cache_inputs, paged_axes

__all__ = ["batch_attention_trace"]


def _pair_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    rows, pages = qo_indptr.tolist(), kv_indptr.tolist()
    for i, kv_len in enumerate(kv_len_arr.tolist()):
        mine, index = slice(rows[i], rows[i + 1]), kv_indices[pages[i] : pages[i + 1]].long()
        k, v = (cache[index].flatten(0, 1)[:kv_len] for cache in (k_cache, v_cache))
        out[mine], lse[mine] = attention_reference(q[mine], k, v, causal, sm_scale=sm_scale)
    return out, lse


def _reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = kv_cache.unbind(1)
    return _pair_reference(q, k, v, heads_first, qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal, sm_scale)


def _template(layout: str, pair: bool) -> TraceTemplate:
    rows = ("num_rows", "num_qo_heads")
    return TraceTemplate(
        "batch_attention",
        axes={**paged_axes(layout, pair), "num_rows": Var("query tokens of all requests")},
        inputs={
            "q": Tensor((*rows, "head_dim")),
            **cache_inputs(layout, pair, "kv_cache"),
            "qo_indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="rows of each request"),
            "kv_indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="pages of each request"),
            "kv_indices": Tensor(("num_indices",), dtype="int32", optional=True, description="pages of all requests"),
            "kv_len_arr": Tensor(("batch_size",), dtype="int32", optional=True, description="keys of each request"),
            "causal": Scalar("bool", optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"o": Tensor((*rows, "head_dim"), dtype_from="q"), "score": Tensor(rows, dtype="float32")},
        name_prefix=f"batch_attention_{layout.lower()}{'_pair' if pair else ''}",
        reference=_pair_reference if pair else _reference,
        description="Attention of requests that prefill and of requests that decode, over their pages.",
    )


_TEMPLATES = {(layout, pair): _template(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)}


def _choose(**arguments: Any) -> TraceTemplate:
    layout = getattr(arguments.get("self"), "_kv_layout", "NHD")
    return _TEMPLATES[layout, isinstance(arguments.get("kv_cache"), tuple)]


batch_attention_trace = TraceDispatch(_choose, tuple(_TEMPLATES.values()))
