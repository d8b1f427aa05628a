# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.pod``: the references of both parts, one after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Optional

import torch

from ...errors import ArgumentError
from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference, paged_attention_reference
from .attention_shared import PAGE_TABLE, QO_INDPTR, cache_inputs, heads, keys_of_request, paged_axes

__all__ = ["batch_pod_trace", "pod_trace"]


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


_LAYOUTS = ("NHD", "HND")
_POD = {key: _pod(*key) for key in itertools.product(_LAYOUTS, _LAYOUTS, (False, True))}
_BATCH_POD = {key: _batch_pod(*key) for key in itertools.product(_LAYOUTS, (False, True))}


def _layout(arguments: dict[str, Any]) -> str:
    """That of the wrapper, which its parts know."""
    return getattr(getattr(arguments.get("self"), "_decode", None), "_kv_layout", "NHD")


def _choose_pod(**arguments: Any) -> TraceTemplate:
    pair = isinstance(arguments.get("paged_kv_cache_d"), tuple)
    return _POD[arguments.get("kv_layout_p", "NHD"), _layout(arguments), pair]


def _choose_batch_pod(**arguments: Any) -> TraceTemplate:
    pair, other = (isinstance(arguments.get(f"paged_kv_cache_{part}"), tuple) for part in "pd")
    if pair != other:
        raise ArgumentError("batch_pod: one cache is a pair and one is not, expected caches of the same form")
    return _BATCH_POD[_layout(arguments), pair]


pod_trace = TraceDispatch(_choose_pod, tuple(_POD.values()))
batch_pod_trace = TraceDispatch(_choose_batch_pod, tuple(_BATCH_POD.values()))
