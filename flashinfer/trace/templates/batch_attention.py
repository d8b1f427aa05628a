# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.BatchAttention``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference
from .attention_shared import cache_inputs, halves_of, one_request_table, paged_axes
from .shared import normal, seeded

__all__ = ["batch_attention_run_trace", "batch_attention_trace"]


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


def _batch_attention_run_reference(
    q: torch.Tensor,
    kv_cache: Any,
    qo_indptr: Optional[torch.Tensor] = None,
    kv_indptr: Optional[torch.Tensor] = None,
    kv_indices: Optional[torch.Tensor] = None,
    kv_len_arr: Optional[torch.Tensor] = None,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the arguments of plan: one request over all that the cache holds.

    The published definition has a cache of the shape of q; such a tensor is taken for keys and values.
    """
    k_cache, v_cache = halves_of(kv_cache)
    if qo_indptr is None or kv_indptr is None or kv_indices is None or kv_len_arr is None:
        k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k_cache, v_cache))
        return attention_reference(q, k, v, causal, sm_scale=sm_scale)
    table = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    return _pair_reference(q, k_cache, v_cache, 0, *table, causal, sm_scale)


def _batch_attention_run_init(
    *,
    num_qo_tokens: int = 1,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    num_pages: int = 1,
    page_size: int = 16,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, pages = seeded(seed, device), (num_pages, page_size, num_kv_heads, head_dim)
    return {
        "plan": {
            **one_request_table(num_pages, page_size, device),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        },
        "run": {
            "q": normal(g, num_qo_tokens, num_qo_heads, head_dim),
            "kv_cache": (normal(g, *pages), normal(g, *pages)),
        },
    }


batch_attention_run_trace = template_of_text(
    "batch_attention_run_h{num_qo_heads}_d{head_dim}",
    "gqa_paged",
    var="num_qo_tokens num_kv_heads",
    inputs="q[num_qo_tokens, num_qo_heads, head_dim]; kv_cache[num_qo_tokens, num_qo_heads, head_dim]!",
    outputs="output[num_qo_tokens, num_qo_heads, head_dim]=q; lse[num_qo_tokens, num_qo_heads]:float32",
    notes={"kv_cache": "pages of keys and values; the shape is that of the published definition"},
    reference=_batch_attention_run_reference,
    init=_batch_attention_run_init,
    description="Attention of requests that prefill and of requests that decode, over their pages.",
)
_HND = {pair: _template("HND", pair) for pair in (False, True)}


def _choose(**arguments: Any) -> TraceTemplate:
    if getattr(arguments.get("self"), "_kv_layout", "NHD") == "NHD":
        return batch_attention_run_trace
    return _HND[isinstance(arguments.get("kv_cache"), tuple)]


batch_attention_trace = TraceDispatch(_choose, (batch_attention_run_trace, *_HND.values()))
