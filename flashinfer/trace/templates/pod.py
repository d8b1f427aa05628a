# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.pod``: the references of both parts, one after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Optional

import torch

from ..._runtime.errors import ArgumentError
from ..notation import template_of_text
from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference, paged_attention_reference
from .attention_shared import (
    PAGE_TABLE,
    QO_INDPTR,
    cache_inputs,
    halves_of,
    heads,
    keys_of_request,
    paged_axes,
    table_of_all_pages,
)
from .shared import even_indptr, normal, seeded

__all__ = [
    "batch_pod_trace",
    "batch_pod_with_paged_kv_cache_run_trace",
    "pod_trace",
    "pod_with_paged_kv_cache_run_trace",
]


def _pod_pair_reference(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    q_d: torch.Tensor,
    k_cache_d: torch.Tensor,
    v_cache_d: torch.Tensor,
    heads_first: int,
    heads_first_p: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal_p: bool = False,
    sm_scale_p: Optional[float] = None,
    window_left_p: int = -1,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if heads_first_p:
        k_p, v_p = k_p.transpose(0, 1), v_p.transpose(0, 1)
    out_p = attention_reference(q_p, k_p, v_p, causal_p, window_left_p, sm_scale=sm_scale_p)[0]
    table = (torch.arange(q_d.shape[0] + 1), kv_indptr, kv_indices, kv_last_page_len)
    return out_p, paged_attention_reference(q_d, k_cache_d, v_cache_d, *table, False, sm_scale, heads_first)


def _pod_reference(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    q_d: torch.Tensor,
    paged_kv_cache_d: torch.Tensor,
    heads_first: int,
    heads_first_p: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    causal_p: bool = False,
    sm_scale_p: Optional[float] = None,
    window_left_p: int = -1,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache_d, v_cache_d = paged_kv_cache_d.unbind(1)
    tensors = (q_p, k_p, v_p, q_d, k_cache_d, v_cache_d)
    table = (kv_indptr, kv_indices, kv_last_page_len)
    return _pod_pair_reference(
        *tensors, heads_first, heads_first_p, *table, causal_p, sm_scale_p, window_left_p, sm_scale
    )


def _pod(layout_p: str, layout: str, pair: bool) -> TraceTemplate:
    axes = {
        **heads(layout),
        "head_dim_vo_p": Const("of the values of the request that prefills", abbrev="dv"),
        **paged_axes(layout, pair),
        "heads_first_p": Const("1 for the layout HND of k_p and v_p", abbrev="", value=int(layout_p == "HND")),
        "num_pages_d": Var(),
        "qo_len": Var("tokens of the request that prefills"),
        "kv_len": Var("its keys"),
    }
    del axes["num_pages"]
    decoding = ("batch_size", "num_qo_heads", "head_dim")
    return TraceTemplate(
        "pod",
        axes=axes,
        inputs={
            "q_p": Tensor(("qo_len", "num_qo_heads", "head_dim")),
            "k_p": keys_of_request(layout_p, "kv_len", "head_dim"),
            "v_p": keys_of_request(layout_p, "kv_len", "head_dim_vo_p"),
            "q_d": Tensor(decoding),
            **cache_inputs(layout, pair, "paged_kv_cache_d", "_d"),
            **PAGE_TABLE,
            "causal_p": Scalar("bool", optional=True),
            "sm_scale_p": Scalar(optional=True),
            "window_left_p": Scalar("int32", optional=True),
            "sm_scale": Scalar(optional=True, description="of the requests that decode, known to plan"),
        },
        outputs={
            "out_p": Tensor(("qo_len", "num_qo_heads", "head_dim_vo_p"), dtype_from="q_p"),
            "out_d": Tensor(decoding, dtype_from="q_d"),
        },
        name_prefix=f"pod_{layout_p.lower()}_paged_{layout.lower()}{'_pair' if pair else ''}",
        reference=_pod_pair_reference if pair else _pod_reference,
        description="Attention of one request that prefills, and of requests that decode one token over their pages.",
    )


def _batch_pod_pair_reference(
    q_p: torch.Tensor,
    k_cache_p: torch.Tensor,
    v_cache_p: torch.Tensor,
    q_d: torch.Tensor,
    k_cache_d: torch.Tensor,
    v_cache_d: torch.Tensor,
    heads_first: int,
    qo_indptr_p: torch.Tensor,
    kv_indptr_p: torch.Tensor,
    kv_indices_p: torch.Tensor,
    kv_last_page_len_p: torch.Tensor,
    qo_indptr_d: torch.Tensor,
    kv_indptr_d: torch.Tensor,
    kv_indices_d: torch.Tensor,
    kv_last_page_len_d: torch.Tensor,
    causal_p: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    table_p = (qo_indptr_p, kv_indptr_p, kv_indices_p, kv_last_page_len_p)
    table_d = (qo_indptr_d, kv_indptr_d, kv_indices_d, kv_last_page_len_d)
    out_p = paged_attention_reference(q_p, k_cache_p, v_cache_p, *table_p, causal_p, sm_scale, heads_first)
    return out_p, paged_attention_reference(q_d, k_cache_d, v_cache_d, *table_d, False, sm_scale, heads_first)


def _batch_pod_reference(
    q_p: torch.Tensor,
    paged_kv_cache_p: torch.Tensor,
    q_d: torch.Tensor,
    paged_kv_cache_d: torch.Tensor,
    heads_first: int,
    qo_indptr_p: torch.Tensor,
    kv_indptr_p: torch.Tensor,
    kv_indices_p: torch.Tensor,
    kv_last_page_len_p: torch.Tensor,
    qo_indptr_d: torch.Tensor,
    kv_indptr_d: torch.Tensor,
    kv_indices_d: torch.Tensor,
    kv_last_page_len_d: torch.Tensor,
    causal_p: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    (k_cache_p, v_cache_p), (k_cache_d, v_cache_d) = paged_kv_cache_p.unbind(1), paged_kv_cache_d.unbind(1)
    tensors = (q_p, k_cache_p, v_cache_p, q_d, k_cache_d, v_cache_d)
    table_p = (qo_indptr_p, kv_indptr_p, kv_indices_p, kv_last_page_len_p)
    table_d = (qo_indptr_d, kv_indptr_d, kv_indices_d, kv_last_page_len_d)
    return _batch_pod_pair_reference(*tensors, heads_first, *table_p, *table_d, causal_p, sm_scale)


def _table(part: str) -> dict[str, Tensor]:
    return {
        f"{name}{part}": replace(tensor, dim_names=[f"{axis}{part}" for axis in tensor.dim_names])
        for name, tensor in {"qo_indptr": QO_INDPTR, **PAGE_TABLE}.items()
    }


def _batch_pod(layout: str, pair: bool) -> TraceTemplate:
    axes = {**paged_axes(layout, pair), "num_rows": Var("query tokens")}
    shared = {axis: kind for axis, kind in axes.items() if isinstance(kind, Const)}
    rows = {part: (f"num_rows{part}", "num_qo_heads", "head_dim") for part in ("_p", "_d")}
    return TraceTemplate(
        "pod",
        axes={**shared, **{f"{axis}{part}": axes[axis] for part in rows for axis in axes if axis not in shared}},
        inputs={
            "q_p": Tensor(rows["_p"]),
            **cache_inputs(layout, pair, "paged_kv_cache_p", "_p"),
            "q_d": Tensor(rows["_d"]),
            **cache_inputs(layout, pair, "paged_kv_cache_d", "_d"),
            **_table("_p"),
            **_table("_d"),
            "causal_p": Scalar("bool", optional=True),
            "sm_scale": Scalar(optional=True),
        },
        outputs={f"out{part}": Tensor(rows[part], dtype_from=f"q{part}") for part in rows},
        name_prefix=f"batch_pod_paged_{layout.lower()}{'_pair' if pair else ''}",
        reference=_batch_pod_pair_reference if pair else _batch_pod_reference,
        description="Attention of requests that prefill (p) and of requests that decode (d), each over its pages.",
    )


def _pod_with_paged_kv_cache_run_reference(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    q_d: torch.Tensor,
    paged_kv_cache_d: Any,
    kv_indptr: Optional[torch.Tensor] = None,
    kv_indices: Optional[torch.Tensor] = None,
    kv_last_page_len: Optional[torch.Tensor] = None,
    causal_p: bool = False,
    sm_scale_p: Optional[float] = None,
    window_left_p: int = -1,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the arguments of plan, the requests that decode share out the pages."""
    k_cache, v_cache = halves_of(paged_kv_cache_d)
    if kv_indptr is None or kv_indices is None or kv_last_page_len is None:
        kv_indptr, kv_indices, kv_last_page_len = table_of_all_pages(q_d.shape[0], k_cache)
    tensors, table = (q_p, k_p, v_p, q_d, k_cache, v_cache), (kv_indptr, kv_indices, kv_last_page_len)
    return _pod_pair_reference(*tensors, 0, 0, *table, causal_p, sm_scale_p, window_left_p, sm_scale)


def _batch_pod_with_paged_kv_cache_run_reference(
    q_p: torch.Tensor,
    paged_kv_cache_p: Any,
    q_d: torch.Tensor,
    paged_kv_cache_d: Any,
    qo_indptr_p: Optional[torch.Tensor] = None,
    kv_indptr_p: Optional[torch.Tensor] = None,
    kv_indices_p: Optional[torch.Tensor] = None,
    kv_last_page_len_p: Optional[torch.Tensor] = None,
    qo_indptr_d: Optional[torch.Tensor] = None,
    kv_indptr_d: Optional[torch.Tensor] = None,
    kv_indices_d: Optional[torch.Tensor] = None,
    kv_last_page_len_d: Optional[torch.Tensor] = None,
    causal_p: bool = False,
    sm_scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the arguments of plan: one request that prefills, and requests of a row that share out the pages."""
    caches_p, caches_d = halves_of(paged_kv_cache_p), halves_of(paged_kv_cache_d)
    if qo_indptr_p is None or kv_indptr_p is None or kv_indices_p is None or kv_last_page_len_p is None:
        qo_indptr_p = torch.tensor([0, q_p.shape[0]])
        kv_indptr_p, kv_indices_p, kv_last_page_len_p = table_of_all_pages(1, caches_p[0])
    if qo_indptr_d is None or kv_indptr_d is None or kv_indices_d is None or kv_last_page_len_d is None:
        qo_indptr_d = torch.arange(q_d.shape[0] + 1)
        kv_indptr_d, kv_indices_d, kv_last_page_len_d = table_of_all_pages(q_d.shape[0], caches_d[0])
    table_p = (qo_indptr_p, kv_indptr_p, kv_indices_p, kv_last_page_len_p)
    table_d = (qo_indptr_d, kv_indptr_d, kv_indices_d, kv_last_page_len_d)
    return _batch_pod_pair_reference(q_p, *caches_p, q_d, *caches_d, 0, *table_p, *table_d, causal_p, sm_scale)


def _pod_with_paged_kv_cache_run_init(
    *,
    prefill_len: int = 8,
    decode_batch_size: int = 1,
    num_pages: int = 1,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, f16, num_pages = seeded(seed, device), torch.float16, max(num_pages, decode_batch_size)
    keys, pages = (prefill_len, num_kv_heads, head_dim), (num_pages, page_size, num_kv_heads, head_dim)
    kv_indptr, kv_indices, last = table_of_all_pages(decode_batch_size, torch.empty(pages[:2], device=device))
    return {
        "plan": {
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices.int(),
            "kv_last_page_len": last,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "q_data_type": f16,
            "kv_data_type": f16,
        },
        "run": {
            "q_p": normal(g, prefill_len, num_qo_heads, head_dim, dtype=f16),
            "k_p": normal(g, *keys, dtype=f16),
            "v_p": normal(g, *keys, dtype=f16),
            "q_d": normal(g, decode_batch_size, num_qo_heads, head_dim, dtype=f16),
            "paged_kv_cache_d": (normal(g, *pages, dtype=f16), normal(g, *pages, dtype=f16)),
        },
    }


def _batch_pod_with_paged_kv_cache_run_init(
    *,
    prefill_len: int = 16,
    decode_batch_size: int = 1,
    num_pages: int = 1,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """One request that prefills, and requests of a row."""
    g, f16, num_pages = seeded(seed, device), torch.float16, max(num_pages, decode_batch_size)
    pages = (num_pages, page_size, num_kv_heads, head_dim)
    plan: dict[str, Any] = {}
    for part, rows, requests in (("p", prefill_len, 1), ("d", decode_batch_size, decode_batch_size)):
        kv_indptr, kv_indices, last = table_of_all_pages(requests, torch.empty(pages[:2], device=device))
        plan[f"qo_indptr_{part}"] = even_indptr(rows, requests, device)
        plan[f"kv_indptr_{part}"], plan[f"kv_indices_{part}"] = kv_indptr, kv_indices.int()
        plan[f"last_page_len_{part}"] = last
    return {
        "plan": {
            **plan,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "q_data_type": f16,
            "kv_data_type": f16,
        },
        "run": {
            "q_p": normal(g, prefill_len, num_qo_heads, head_dim, dtype=f16),
            "paged_kv_cache_p": (normal(g, *pages, dtype=f16), normal(g, *pages, dtype=f16)),
            "q_d": normal(g, decode_batch_size, num_qo_heads, head_dim, dtype=f16),
            "paged_kv_cache_d": (normal(g, *pages, dtype=f16), normal(g, *pages, dtype=f16)),
        },
    }


_NAME = "_h{num_qo_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}"
_PAGES = "[num_pages, (page_size), num_kv_heads, head_dim]*"
_OUTPUTS = "output_p[prefill_len, num_qo_heads, head_dim]=q_p; output_d[decode_batch_size, num_qo_heads, head_dim]=q_d"

pod_with_paged_kv_cache_run_trace = template_of_text(
    f"pod_run{_NAME}",
    "pod",
    var="prefill_len decode_batch_size num_pages",
    inputs="q_p[prefill_len, num_qo_heads, head_dim]; k_p[prefill_len, num_kv_heads, head_dim];"
    "v_p[prefill_len, num_kv_heads, head_dim]; q_d[decode_batch_size, num_qo_heads, head_dim];"
    f"paged_kv_cache_d{_PAGES}",
    outputs=_OUTPUTS,
    reference=_pod_with_paged_kv_cache_run_reference,
    init=_pod_with_paged_kv_cache_run_init,
    description="Attention of one request that prefills, and of requests that decode one token over their pages.",
)
batch_pod_with_paged_kv_cache_run_trace = template_of_text(
    f"batch_pod_run{_NAME}",
    "pod",
    var="prefill_len decode_batch_size num_pages",
    inputs=f"q_p[prefill_len, num_qo_heads, head_dim]; paged_kv_cache_p{_PAGES};"
    f"q_d[decode_batch_size, num_qo_heads, head_dim]; paged_kv_cache_d{_PAGES}",
    outputs=_OUTPUTS,
    reference=_batch_pod_with_paged_kv_cache_run_reference,
    init=_batch_pod_with_paged_kv_cache_run_init,
    description="Attention of requests that prefill (p) and of requests that decode (d), each over its pages.",
)
_LAYOUTS = ("NHD", "HND")
_POD = {key: _pod(*key) for key in itertools.product(_LAYOUTS, _LAYOUTS, (False, True))}
_BATCH_POD = {key: _batch_pod(*key) for key in itertools.product(_LAYOUTS, (False, True))}


def _layout(arguments: dict[str, Any]) -> str:
    """Return the layout of the wrapper, which the decode wrapper inside it knows."""
    return getattr(getattr(arguments.get("self"), "_decode", None), "_kv_layout", "NHD")


def _shape(arguments: dict[str, Any], name: str) -> tuple[int, ...]:
    value = arguments.get(name)
    return tuple(getattr(value[0] if isinstance(value, (tuple, list)) else value, "shape", ()))


def _choose_pod(**arguments: Any) -> TraceTemplate:
    """The published definition has as many keys as queries that prefill, and one width, in the layout NHD."""
    layouts = arguments.get("kv_layout_p", "NHD"), _layout(arguments)
    q, k, v = (_shape(arguments, name) for name in ("q_p", "k_p", "v_p"))
    if layouts == ("NHD", "NHD") and q[:1] == k[:1] and k == v:
        return pod_with_paged_kv_cache_run_trace
    return _POD[layouts[0], layouts[1], isinstance(arguments.get("paged_kv_cache_d"), tuple)]


def _choose_batch_pod(**arguments: Any) -> TraceTemplate:
    """The published definition has caches of the same size, in the layout NHD."""
    pair, other = (isinstance(arguments.get(f"paged_kv_cache_{part}"), tuple) for part in "pd")
    if pair != other:
        raise ArgumentError("batch_pod: both caches must have the same form, got a pair and one tensor")
    pages = {_shape(arguments, f"paged_kv_cache_{part}")[:1] for part in "pd"}
    if _layout(arguments) == "NHD" and len(pages) == 1:
        return batch_pod_with_paged_kv_cache_run_trace
    return _BATCH_POD[_layout(arguments), pair]


pod_trace = TraceDispatch(_choose_pod, (pod_with_paged_kv_cache_run_trace, *_POD.values()))
batch_pod_trace = TraceDispatch(_choose_batch_pod, (batch_pod_with_paged_kv_cache_run_trace, *_BATCH_POD.values()))
