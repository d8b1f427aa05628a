# SPDX-License-Identifier: Apache-2.0
"""The published templates of the batch wrappers of decode and prefill, and their references.

Caches in one tensor, and the layout HND, have templates of ours in decode.py and prefill.py.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var
from .attention_reference import attention_reference, paged_states_reference
from .shared import even_indptr, normal, seeded

__all__ = ["gqa_paged_decode_trace", "gqa_paged_prefill_trace", "gqa_ragged_prefill_trace"]


# A definition has no arguments of plan(): pages are full, and prefill is causal, unless the caller says otherwise.


def _gqa_paged_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: Optional[float] = None,
    kv_last_page_len: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size = len(kv_indptr) - 1
    qo_indptr = torch.arange(batch_size + 1) * (q.shape[0] // max(batch_size, 1))
    return _gqa_paged_prefill_reference(
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, kv_last_page_len
    )


def _gqa_paged_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: Optional[float] = None,
    kv_last_page_len: Optional[torch.Tensor] = None,
    causal: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    last = torch.full_like(kv_indptr[1:], k_cache.shape[1]) if kv_last_page_len is None else kv_last_page_len
    return paged_states_reference(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last, causal, sm_scale, 0)


def _gqa_ragged_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: Optional[float] = None,
    causal: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    rows, keys = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(rows) - 1):
        mine, its = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        out[mine], lse[mine] = attention_reference(q[mine], k[its], v[its], causal, sm_scale=sm_scale)
    return out, lse


def _gqa_paged_decode_init(
    *,
    batch_size: int,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 0,
    num_pages_per_seq: int = 4,
    len_indptr: int = 0,
    num_kv_indices: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, used = seeded(seed, device), num_kv_indices or batch_size * num_pages_per_seq
    num_pages = max(num_pages, used)
    cache = (num_pages, page_size, num_kv_heads, head_dim)
    return {
        "plan": {
            "indptr": even_indptr(used, batch_size, device),
            "indices": torch.randperm(num_pages, generator=g, device=device)[:used].int(),
            "last_page_len": torch.full((batch_size,), page_size, dtype=torch.int32, device=device),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        },
        "run": {
            "q": normal(g, batch_size, num_qo_heads, head_dim),
            "paged_kv_cache": (normal(g, *cache), normal(g, *cache)),
        },
    }


def _gqa_paged_prefill_init(
    *,
    total_q: int,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 0,
    len_indptr: int = 0,
    num_kv_indices: int = 0,
    batch_size: int = 4,
    num_pages_per_seq: int = 8,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    batch_size = len_indptr - 1 if len_indptr else batch_size
    g, used = seeded(seed, device), num_kv_indices or batch_size * num_pages_per_seq
    num_pages = max(num_pages, used)
    cache = (num_pages, page_size, num_kv_heads, head_dim)
    return {
        "plan": {
            "qo_indptr": even_indptr(total_q, batch_size, device),
            "paged_kv_indptr": even_indptr(used, batch_size, device),
            "paged_kv_indices": torch.randperm(num_pages, generator=g, device=device)[:used].int(),
            "paged_kv_last_page_len": torch.full((batch_size,), page_size, dtype=torch.int32, device=device),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim,
            "head_dim_vo": head_dim,
            "page_size": page_size,
            "causal": True,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        },
        "run": {
            "q": normal(g, total_q, num_qo_heads, head_dim),
            "paged_kv_cache": (normal(g, *cache), normal(g, *cache)),
        },
    }


def _gqa_ragged_init(
    *,
    total_q: int,
    total_kv: int = 512,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    batch_size: int = 4,
    len_indptr: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    batch_size = len_indptr - 1 if len_indptr else batch_size
    g, keys = seeded(seed, device), (total_kv, num_kv_heads, head_dim)
    return {
        "plan": {
            "qo_indptr": even_indptr(total_q, batch_size, device),
            "kv_indptr": even_indptr(total_kv, batch_size, device),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim,
            "head_dim_vo": head_dim,
            "causal": True,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        },
        "run": {"q": normal(g, total_q, num_qo_heads, head_dim), "k": normal(g, *keys), "v": normal(g, *keys)},
    }


_GQA_HEADS: dict[str, Axis] = {
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
}
_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
_KEYS = ("total_kv", "num_kv_heads", "head_dim")
_HALVES = {
    name: Tensor(_PAGES, param="paged_kv_cache", tuple_idx=i, may_lack="page_size")
    for i, name in enumerate(("k_cache", "v_cache"))
}
_INDPTR = Tensor(("len_indptr",), dtype="int32", optional=True, description="where each request begins")
_INDICES = Tensor(("num_kv_indices",), dtype="int32", optional=True, description="pages of all requests")
_OPTIONS = {"sm_scale": Scalar(optional=True), "return_lse": Scalar("int32", optional=True)}


def _results(rows: str) -> dict[str, Tensor]:
    lse = Tensor((rows, "num_qo_heads"), dtype="float32", optional=True, description="log2 of the sum of exp(logit)")
    return {"output": Tensor((rows, "num_qo_heads", "head_dim"), dtype_from="q"), "lse": lse}


gqa_paged_decode_trace = TraceTemplate(
    "gqa_paged",
    axes={
        **_GQA_HEADS,
        "page_size": Const(abbrev="ps"),
        **{axis: Var() for axis in ("batch_size", "num_pages", "len_indptr", "num_kv_indices")},
    },
    inputs={
        "q": Tensor(("batch_size", "num_qo_heads", "head_dim")),
        **_HALVES,
        "kv_indptr": _INDPTR,
        "kv_indices": _INDICES,
        **_OPTIONS,
    },
    outputs=_results("batch_size"),
    name_prefix="gqa_paged_decode",
    reference=_gqa_paged_decode_reference,
    init=_gqa_paged_decode_init,
    constraints=["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    description="Attention of one query token of each request over its pages.",
)

gqa_paged_prefill_trace = TraceTemplate(
    "gqa_paged",
    axes={
        **_GQA_HEADS,
        "page_size": Const(abbrev="ps"),
        **{axis: Var() for axis in ("len_indptr", "total_q", "num_kv_indices", "num_pages")},
    },
    inputs={
        "q": Tensor(("total_q", "num_qo_heads", "head_dim")),
        **_HALVES,
        "qo_indptr": _INDPTR,
        "kv_indptr": _INDPTR,
        "kv_indices": _INDICES,
        **_OPTIONS,
    },
    outputs=_results("total_q"),
    name_prefix="gqa_paged_prefill",
    reference=_gqa_paged_prefill_reference,
    init=_gqa_paged_prefill_init,
    constraints=["total_q == qo_indptr[-1].item()", "num_kv_indices == kv_indptr[-1].item()"],
    description="Causal attention of the last tokens of each request over its pages.",
)

gqa_ragged_prefill_trace = TraceTemplate(
    "gqa_ragged",
    axes={**_GQA_HEADS, **{axis: Var() for axis in ("len_indptr", "total_q", "total_kv")}},
    inputs={
        "q": Tensor(("total_q", "num_qo_heads", "head_dim")),
        "k": Tensor(_KEYS),
        "v": Tensor(_KEYS),
        "qo_indptr": _INDPTR,
        "kv_indptr": _INDPTR,
        **_OPTIONS,
    },
    outputs=_results("total_q"),
    reference=_gqa_ragged_reference,
    init=_gqa_ragged_init,
    stem="gqa_ragged_prefill",
    constraints=["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"],
    description="Causal attention of the last tokens of each request over its keys.",
)
