# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the rotary embeddings with fp8 output, and of their append to a paged KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import torch

from ...errors import ArgumentError
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var, by_rank
from .rope import rotate
from .shared import fp8_check, to_fp8

__all__ = [
    "mla_rope_quantize_fp8_trace",
    "rope_quantize_fp8_append_paged_kv_cache_trace",
    "rope_quantize_fp8_trace",
]


def _quantized(
    rope: torch.Tensor,
    nope: Optional[torch.Tensor],
    table_rows: torch.Tensor,
    is_neox: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated part and the other one, each times the scale; a part that is missing has width 0."""
    cos, sin = table_rows.chunk(2, dim=-1)
    nope = rope[..., :0] if nope is None else nope
    return to_fp8(rotate(rope, cos, sin, not is_neox) * scale, dtype), to_fp8(nope.float() * scale, dtype)


def _rope_quantize_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out_dtype: torch.dtype = torch.float8_e4m3fn,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = cos_sin_cache[pos_ids.long()]
    q_rope_out, q_nope_out = _quantized(q_rope, q_nope, rows, is_neox, quant_scale_q, q_rope_out_dtype)
    k_rope_out, k_nope_out = _quantized(k_rope, k_nope, rows, is_neox, quant_scale_kv, q_rope_out_dtype)
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


def _appended(
    cache: torch.Tensor, value: torch.Tensor, page: torch.Tensor, entry: torch.Tensor, heads_first: int
) -> torch.Tensor:
    """A copy of the cache with one value per token written. As bytes: torch cannot assign to fp8 by index."""
    result = cache.contiguous().clone().view(torch.uint8)
    if heads_first and cache.ndim == 4:
        result[page, :, entry] = value.view(torch.uint8)
    else:
        result[page, entry] = value.view(torch.uint8)
    return result.view(cache.dtype)


def _rope_quantize_append_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    first_cache: torch.Tensor,
    second_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    heads_first: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, page_size = first_cache.dtype, first_cache.shape[2 if heads_first and first_cache.ndim == 4 else 1]
    q_rope_out, k_rope_out, q_nope_out, k_nope_out = _rope_quantize_reference(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quant_scale_q, quant_scale_kv, dtype
    )
    kept = (batch_indices >= 0).nonzero().flatten()  # for padding nothing is written; rows of q are then anything
    request, slot = batch_indices.long()[kept], positions.long()[kept]
    page, entry = kv_indices.long()[kv_indptr.long()[request] + slot // page_size], slot % page_size
    if v is None:
        first, second = k_nope_out, k_rope_out
    else:
        first, second = torch.cat([k_rope_out, k_nope_out], dim=-1), to_fp8(v.float() * quant_scale_kv, dtype)
    return (
        q_rope_out,
        q_nope_out,
        _appended(first_cache, first[kept], page, entry, heads_first),
        _appended(second_cache, second[kept], page, entry, heads_first),
    )


_FP8: dict[str, Any] = {"dtype": "float8_e4m3fn"}
_STYLE: dict[str, Value] = {
    "is_neox": Scalar("bool", description="pairs are half the rope columns apart, otherwise neighbours"),
    "quant_scale_q": Scalar(description="the queries are multiplied by it before the conversion to fp8"),
    "quant_scale_kv": Scalar(description="the same for keys and values"),
}


def _axes(mla: bool) -> dict[str, Axis]:
    axes: dict[str, Axis] = {"nnz": Var("tokens"), "num_qo_heads": Const(abbrev="h")}
    axes |= {} if mla else {"num_kv_heads": Const(abbrev="kv")}
    return axes | {
        "rope_dim": Const("rotated columns", abbrev="r"),
        "q_nope_dim": Var("columns of q that are not rotated"),
        "k_nope_dim": Var("columns of k that are not rotated"),
        "max_position": Var("rows of the table"),
    }


def _parts(mla: bool) -> dict[str, Tensor]:
    q, k = ("nnz", "num_qo_heads"), ("nnz",) if mla else ("nnz", "num_kv_heads")
    return {
        "q_rope": Tensor((*q, "rope_dim")),
        "k_rope": Tensor((*k, "rope_dim")),
        "q_nope": Tensor((*q, "q_nope_dim"), optional=True),
        "k_nope": Tensor((*k, "k_nope_dim"), optional=True),
    }


_TABLE: dict[str, Value] = {
    "cos_sin_cache": Tensor(("max_position", "rope_dim"), dtype="float32", description="cosines, then sines"),
    "pos_ids": Tensor(("nnz",), description="row of the table for each token"),
}


def _init_quantize(
    nnz: int,
    num_qo_heads: int,
    rope_dim: int,
    q_nope_dim: int,
    k_nope_dim: int,
    num_kv_heads: int = 0,
    max_position: int = 4096,
    device: str = "cpu",
) -> dict[str, Any]:
    """Positions that the table has; no key heads is MLA."""
    q, k = (nnz, num_qo_heads), (nnz, num_kv_heads) if num_kv_heads else (nnz,)
    angle = torch.arange(max_position)[:, None] * 1e4 ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    return {
        "q_rope": torch.randn(*q, rope_dim, device=device).bfloat16(),
        "k_rope": torch.randn(*k, rope_dim, device=device).bfloat16(),
        "q_nope": torch.randn(*q, q_nope_dim, device=device).bfloat16(),
        "k_nope": torch.randn(*k, k_nope_dim, device=device).bfloat16(),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device),
        "pos_ids": torch.randint(0, max_position, (nnz,), dtype=torch.int32, device=device),
    }


def _init_append(
    nnz: int,
    num_qo_heads: int,
    rope_dim: int,
    q_nope_dim: int,
    k_nope_dim: int,
    v_dim: int,
    num_pages: int,
    page_size: int,
    num_indices: int,
    indptr_len: int,
    heads_first: int,
    num_kv_heads: int = 0,
    max_position: int = 4096,
    device: str = "cpu",
) -> dict[str, Any]:
    """Requests that share out the pages, and tokens dealt to them in turn, each to the next slot."""
    made = _init_quantize(nnz, num_qo_heads, rope_dim, q_nope_dim, k_nope_dim, num_kv_heads, max_position, device)
    token, requests = torch.arange(nnz), indptr_len - 1
    slots = (
        (page_size,) if not num_kv_heads else (num_kv_heads, page_size) if heads_first else (page_size, num_kv_heads)
    )
    widths = (rope_dim + k_nope_dim, v_dim) if num_kv_heads else (k_nope_dim, rope_dim)
    indices = {
        "kv_indices": torch.randperm(num_pages)[:num_indices],
        "kv_indptr": torch.arange(indptr_len) * num_indices // requests,
        "batch_indices": token % requests,
        "positions": token // requests,
    }
    return {
        **made,
        "v": torch.randn(nnz, num_kv_heads, v_dim, device=device).bfloat16() if num_kv_heads else None,
        "first_cache": torch.zeros(num_pages, *slots, widths[0], device=device).to(torch.float8_e4m3fn),
        "second_cache": torch.zeros(num_pages, *slots, widths[1], device=device).to(torch.float8_e4m3fn),
        **{name: index.int().to(device) for name, index in indices.items()},
    }


def _quantize_template(name: str, mla: bool) -> TraceTemplate:
    parts = _parts(mla)
    return TraceTemplate(
        "rope_quantize",
        axes=_axes(mla),
        inputs={**parts, **_TABLE, **_STYLE},
        outputs={
            f"{part}_out": Tensor(parts[part].dim_names, param=f"{part}_out", dtype_from="q_rope_out", **_FP8)
            for part in ("q_rope", "k_rope", "q_nope", "k_nope")
        },
        name_prefix=name if mla else f"{name}_gqa",
        reference=_rope_quantize_reference,
        check=fp8_check,
        init=_init_quantize,
        description="Rotary embedding of one part of q and k; that part and the other one are quantised to fp8.",
    )


def _by_keys(name: str) -> TraceDispatch:
    return by_rank("k_rope", {2: _quantize_template(name, mla=True), 3: _quantize_template(name, mla=False)})


rope_quantize_fp8_trace = _by_keys("rope_quantize_fp8")
mla_rope_quantize_fp8_trace = _by_keys("mla_rope_quantize_fp8")


def _append_axes(mla: bool, heads_first: bool) -> dict[str, Axis]:
    """Of a cache (pages, slots and heads in either order, columns), and of the values, which MLA does not have."""
    columns: dict[str, Axis] = (
        {"v_heads": Var()} if mla else {"head_dim": Var("columns of a key, rope_dim + k_nope_dim")}
    )
    return {
        **_axes(mla),
        **columns,
        "v_dim": Var("columns of v"),
        "num_pages": Var(),
        "page_size": Const(abbrev="ps"),
        "num_indices": Var("pages of all requests"),
        "indptr_len": Var("requests + 1"),
        "heads_first": Const("1 for the layout HND", abbrev="", value=int(heads_first)),
    }


def _append_template(mla: bool, heads_first: bool) -> TraceTemplate:
    slots = ("page_size",) if mla else ("num_kv_heads", "page_size") if heads_first else ("page_size", "num_kv_heads")
    columns = ("k_nope_dim", "rope_dim") if mla else ("head_dim", "v_dim")
    caches = {
        name: Tensor(("num_pages", *slots, column), param="paged_kv_cache", tuple_idx=i, **_FP8)
        for i, (name, column) in enumerate(zip(("first_cache", "second_cache"), columns, strict=True))
    }
    q = ("nnz", "num_qo_heads")
    return TraceTemplate(
        "rope_quantize",
        axes=_append_axes(mla, heads_first),
        inputs={
            **_parts(mla),
            "v": Tensor(("nnz", "v_heads" if mla else "num_kv_heads", "v_dim"), optional=True),
            **_TABLE,
            **caches,
            "kv_indices": Tensor(("num_indices",), description="pages of each request, one request after the other"),
            "kv_indptr": Tensor(("indptr_len",), description="where the pages of each request begin"),
            "batch_indices": Tensor(("nnz",), description="request of each token; negative for padding"),
            "positions": Tensor(("nnz",), description="slot of each token in its request"),
            **_STYLE,
        },
        outputs={
            "q_rope_out": Tensor((*q, "rope_dim"), param="q_rope_out", dtype_from="first_cache", **_FP8),
            "q_nope_out": Tensor((*q, "q_nope_dim"), param="q_nope_out", dtype_from="first_cache", **_FP8),
            **{f"{name}_out": replace(cache, dtype_from=name) for name, cache in caches.items()},
        },
        name_prefix="rope_quantize_fp8_append_paged_" + ("mla" if mla else "gqa_hnd" if heads_first else "gqa_nhd"),
        reference=_rope_quantize_append_reference,
        check=fp8_check,
        init=_init_append,
        constraints=None if mla else ["head_dim == rope_dim + k_nope_dim"],
        description="Rotary embedding, quantisation to fp8, and append of keys and values to a paged cache.",
    )


_APPEND = {
    "MLA": _append_template(mla=True, heads_first=False),
    "NHD": _append_template(mla=False, heads_first=False),
    "HND": _append_template(mla=False, heads_first=True),
}


def _choose_append(k_rope: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> TraceTemplate:
    key = "MLA" if k_rope.ndim == 2 else kv_layout
    if key not in _APPEND:
        raise ArgumentError(f"fi_trace: kv_layout is {kv_layout!r}, expected 'NHD' or 'HND'")
    return _APPEND[key]


rope_quantize_fp8_append_paged_kv_cache_trace = TraceDispatch(_choose_append, tuple(_APPEND.values()))
