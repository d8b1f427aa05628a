# SPDX-License-Identifier: Apache-2.0
"""Templates and references of attention over shared prefixes: each set of keys by itself, then merged in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import Axis, Scalar, Tensor, TraceTemplate, Var
from .attention_reference import attention_reference, paged_states_reference
from .attention_shared import (
    PAGE_TABLE,
    QO_INDPTR,
    by_wrapper,
    cache_inputs,
    halves_of,
    keys_of_request,
    one_request_table,
    paged_axes,
)
from .cascade import _merge_state_reference
from .shared import normal, seeded

__all__ = [
    "multi_level_cascade_run_trace",
    "multi_level_cascade_trace",
    "shared_prefix_decode_trace",
    "shared_prefix_prefill_trace",
]


def _levels_pair_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    level_sizes: torch.Tensor,
    qo_indptr_arr: torch.Tensor,
    paged_kv_indptr_arr: torch.Tensor,
    paged_kv_indices_arr: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    sizes = level_sizes.tolist()
    ends = [size + 1 for size in sizes]
    rows, pages = qo_indptr_arr.split(ends), paged_kv_indptr_arr.split(ends)
    indices = paged_kv_indices_arr.split([int(indptr[-1]) for indptr in pages])
    last = paged_kv_last_page_len.split(sizes)
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for i in range(len(sizes)):
        is_causal = causal and i == len(sizes) - 1  # the other levels are keys before all queries
        table = (rows[i], pages[i], indices[i], last[i])
        state = paged_states_reference(q.float(), k_cache, v_cache, *table, is_causal, sm_scale, heads_first)
        out, lse = _merge_state_reference(out, lse, *state)
    return out.to(q.dtype)


def _levels_reference(
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    heads_first: int,
    level_sizes: torch.Tensor,
    qo_indptr_arr: torch.Tensor,
    paged_kv_indptr_arr: torch.Tensor,
    paged_kv_indices_arr: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    k_cache, v_cache = paged_kv_cache.unbind(1)
    table = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
    return _levels_pair_reference(q, k_cache, v_cache, heads_first, level_sizes, *table, causal, sm_scale)


def _multi_level(layout: str, pair: bool) -> TraceTemplate:
    axes: dict[str, Axis] = {
        **paged_axes(layout, pair),
        "num_rows": Var(),
        "num_levels": Var(),
        "indptr_len": Var("entries of all levels + num_levels"),
        "num_indices": Var("pages of all levels"),
        "num_entries": Var("entries of all levels"),
    }
    del axes["batch_size"]
    known_to_plan = {
        "qo_indptr_arr": Tensor(("indptr_len",), description="rows of the entries of each level"),
        "paged_kv_indptr_arr": Tensor(("indptr_len",), description="where the pages of each entry begin in its level"),
        "paged_kv_indices_arr": Tensor(("num_indices",), description="pages"),
        "paged_kv_last_page_len": Tensor(("num_entries",), description="entries in use of the last page"),
    }
    level_after_level = {
        name: replace(
            tensor, dtype="int32", optional=True, description=f"{tensor.description}; one level after the other"
        )
        for name, tensor in known_to_plan.items()
    }
    return TraceTemplate(
        "cascade",
        axes=axes,
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            **cache_inputs(layout, pair),
            "level_sizes": Tensor(("num_levels",), dtype="int32", optional=True, description="entries of each level"),
            **level_after_level,
            "causal": Scalar("bool", optional=True, description="of the last level"),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"out": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="q")},
        name_prefix=f"multi_level_cascade_{layout.lower()}{'_pair' if pair else ''}",
        reference=_levels_pair_reference if pair else _levels_reference,
        description="Attention over keys in levels: entries of the first are shared by most rows.",
    )


def _shared_prefix_prefill_pair_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
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
    if heads_first:
        k_shared, v_shared = k_shared.transpose(0, 1), v_shared.transpose(0, 1)
    shared = attention_reference(q.float(), k_shared, v_shared, sm_scale=sm_scale)
    table = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    own = paged_states_reference(q.float(), k_cache, v_cache, *table, causal, sm_scale, heads_first)
    return _merge_state_reference(*shared, *own)[0].to(q.dtype)


def _shared_prefix_prefill_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    unique_kv_cache: torch.Tensor,
    heads_first: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    k_cache, v_cache = unique_kv_cache.unbind(1)
    keys = (k_shared, v_shared, k_cache, v_cache)
    table = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    return _shared_prefix_prefill_pair_reference(q, *keys, heads_first, *table, causal, sm_scale)


def _shared_prefix_decode_pair_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads_first: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    keys = (k_shared, v_shared, k_cache, v_cache)
    table = (torch.arange(q.shape[0] + 1), kv_indptr, kv_indices, kv_last_page_len)
    return _shared_prefix_prefill_pair_reference(q, *keys, heads_first, *table)


def _shared_prefix_decode_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    unique_kv_cache: torch.Tensor,
    heads_first: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    k_cache, v_cache = unique_kv_cache.unbind(1)
    keys = (k_shared, v_shared, k_cache, v_cache)
    return _shared_prefix_decode_pair_reference(q, *keys, heads_first, kv_indptr, kv_indices, kv_last_page_len)


def _keys(layout: str, pair: bool) -> dict[str, Tensor]:
    shared = keys_of_request(layout, "shared_len", "head_dim")
    return {"k_shared": shared, "v_shared": shared, **cache_inputs(layout, pair, "unique_kv_cache")}


def _shared_prefix_decode(layout: str, pair: bool) -> TraceTemplate:
    rows = ("batch_size", "num_qo_heads", "head_dim")
    return TraceTemplate(
        "cascade",
        axes={**paged_axes(layout, pair), "shared_len": Var("keys of the prefix")},
        inputs={"q": Tensor(rows), **_keys(layout, pair), **PAGE_TABLE},
        outputs={"out": Tensor(rows, dtype_from="q")},
        name_prefix=f"shared_prefix_decode_{layout.lower()}{'_pair' if pair else ''}",
        reference=_shared_prefix_decode_pair_reference if pair else _shared_prefix_decode_reference,
        description="Attention of one token per request over a prefix that all share and over its own pages.",
    )


def _shared_prefix_prefill(layout: str, pair: bool) -> TraceTemplate:
    rows = ("num_rows", "num_qo_heads", "head_dim")
    return TraceTemplate(
        "cascade",
        axes={
            **paged_axes(layout, pair),
            "num_rows": Var("query tokens of all requests"),
            "shared_len": Var("keys of the prefix"),
        },
        inputs={
            "q": Tensor(rows),
            **_keys(layout, pair),
            "qo_indptr": QO_INDPTR,
            **PAGE_TABLE,
            "causal": Scalar("bool", optional=True, description="of the request's own keys"),
            "sm_scale": Scalar(optional=True),
        },
        outputs={"out": Tensor(rows, dtype_from="q")},
        name_prefix=f"shared_prefix_prefill_{layout.lower()}{'_pair' if pair else ''}",
        reference=_shared_prefix_prefill_pair_reference if pair else _shared_prefix_prefill_reference,
        description="Attention of the last tokens of each request over a prefix that all share and over its own pages.",
    )


def _multi_level_cascade_run_reference(
    q: torch.Tensor,
    paged_kv_cache: Any,
    level_sizes: Optional[torch.Tensor] = None,
    qo_indptr_arr: Optional[torch.Tensor] = None,
    paged_kv_indptr_arr: Optional[torch.Tensor] = None,
    paged_kv_indices_arr: Optional[torch.Tensor] = None,
    paged_kv_last_page_len: Optional[torch.Tensor] = None,
    causal: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> torch.Tensor:
    """Without the arguments of plan: every row sees all that the cache holds."""
    k_cache, v_cache = halves_of(paged_kv_cache)
    table = (level_sizes, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
    if any(part is None for part in table):
        return attention_reference(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), sm_scale=sm_scale)[0]
    return _levels_pair_reference(q, k_cache, v_cache, 0, *table, causal, sm_scale)  # type: ignore[arg-type]


def _multi_level_cascade_run_init(
    *,
    batch_size: int = 1,
    num_pages: int = 1,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Tables of one level."""
    g = seeded(seed, device)
    return {
        "plan": {
            "qo_indptr": torch.tensor([0, batch_size], dtype=torch.int32, device=device),
            **one_request_table(num_pages, page_size, device),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "q_data_type": torch.bfloat16,
        },
        "run": {
            "q": normal(g, batch_size, num_qo_heads, head_dim),
            "paged_kv_cache": normal(g, num_pages, 2, page_size, num_kv_heads, head_dim),
        },
    }


multi_level_cascade_run_trace = template_of_text(
    "multi_level_cascade_run_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}",
    "cascade_attention",
    var="batch_size num_pages",
    inputs="q[batch_size, num_qo_heads, head_dim]; paged_kv_cache[num_pages, (page_size), num_kv_heads, head_dim]*",
    outputs="output[batch_size, num_qo_heads, head_dim]=q",
    reference=_multi_level_cascade_run_reference,
    init=_multi_level_cascade_run_init,
    description="Attention over keys in levels: entries of the first are shared by most rows.",
)
multi_level_cascade_trace = by_wrapper(_multi_level, published=multi_level_cascade_run_trace, one_tensor=True)
shared_prefix_decode_trace = by_wrapper(_shared_prefix_decode, "unique_kv_cache")
shared_prefix_prefill_trace = by_wrapper(_shared_prefix_prefill, "unique_kv_cache")
