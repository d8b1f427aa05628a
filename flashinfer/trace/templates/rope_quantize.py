# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the rotary embeddings with fp8 output, and of their append to a paged KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import torch

from ..._runtime.errors import ArgumentError
from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var
from .page_shared import append_tables
from .rope_shared import cos_sin_table, rotate
from .shared import fp8_check, normal, randint, seeded, to_fp8

__all__ = [
    "mla_rope_quantize_fp8_trace",
    "rope_quantize_append_reference",
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


def _rope_quantize_fp8_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out_dtype: torch.dtype = torch.float8_e4m3fn,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, dtype = cos_sin_cache[pos_ids.long()], quantize_dtype or q_rope_out_dtype
    q_rope_out, q_nope_out = _quantized(q_rope, q_nope, rows, is_neox, quant_scale_q, dtype)
    k_rope_out, k_nope_out = _quantized(k_rope, k_nope, rows, is_neox, quant_scale_kv, dtype)
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


def rope_quantize_append_reference(
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
    q_rope_out, k_rope_out, q_nope_out, k_nope_out = _rope_quantize_fp8_reference(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, dtype, quant_scale_q, quant_scale_kv
    )
    kept = (batch_indices >= 0).nonzero().flatten()  # padding writes nothing; its rows of q are undefined
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


def _rope_quantize_fp8_append_paged_kv_cache_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries: the published definition does not name the caches among its outputs."""
    made = _rope_quantize_fp8_reference(
        *(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox),
        *(quantize_dtype or paged_kv_cache[0].dtype, quant_scale_q, quant_scale_kv),
    )
    return made[0], made[2]


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


def _rope_quantize_fp8_init(
    *,
    nnz: int,
    num_q_heads: int = 8,
    num_k_heads: int = 2,
    rope_dim: int = 64,
    no_rope_dim: int = 64,
    max_seq_len: int = 4096,
    rotary_dim: int = 64,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Positions that the table has."""
    g = seeded(seed, device)
    return {
        "q_rope": normal(g, nnz, num_q_heads, rope_dim),
        "k_rope": normal(g, nnz, num_k_heads, rope_dim),
        "q_nope": normal(g, nnz, num_q_heads, no_rope_dim),
        "k_nope": normal(g, nnz, num_k_heads, no_rope_dim),
        "cos_sin_cache": cos_sin_table(max_seq_len, rotary_dim, device),
        "pos_ids": randint(g, max_seq_len, nnz),
        "is_neox": False,
    }


def _mla_rope_quantize_fp8_init(
    *,
    nnz: int,
    num_q_heads: int = 128,
    rope_dim: int = 64,
    no_rope_dim: int = 512,
    max_seq_len: int = 4096,
    rotary_dim: int = 64,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "q_rope": normal(g, nnz, num_q_heads, rope_dim),
        "k_rope": normal(g, nnz, rope_dim),
        "q_nope": normal(g, nnz, num_q_heads, no_rope_dim),
        "k_nope": normal(g, nnz, no_rope_dim),
        "cos_sin_cache": cos_sin_table(max_seq_len, rotary_dim, device),
        "pos_ids": randint(g, max_seq_len, nnz).long(),
        "is_neox": False,
    }


def _rope_quantize_fp8_append_paged_kv_cache_init(
    *,
    nnz: int,
    num_q_heads: int = 8,
    num_k_heads: int = 2,
    rope_dim: int = 64,
    no_rope_dim: int = 64,
    head_dim: int = 0,
    max_seq_len: int = 4096,
    rotary_dim: int = 64,
    num_pages: int = 4,
    page_size: int = 16,
    batch_size: int = 2,
    batch_size_plus_1: int = 0,
    num_kv_indices: int = 0,
    num_pages_per_seq: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Requests that share out the pages; tokens are the last ones of their requests."""
    g, head_dim = seeded(seed, device), head_dim or rope_dim + no_rope_dim
    batch_size = batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    used = num_kv_indices or batch_size * num_pages_per_seq
    num_pages, tables = append_tables(g, nnz, batch_size, page_size, num_pages, used)
    pages = (num_pages, page_size, num_k_heads, head_dim)
    return {
        "q_rope": normal(g, nnz, num_q_heads, rope_dim),
        "k_rope": normal(g, nnz, num_k_heads, rope_dim),
        "q_nope": normal(g, nnz, num_q_heads, no_rope_dim),
        "k_nope": normal(g, nnz, num_k_heads, no_rope_dim),
        "v": normal(g, nnz, num_k_heads, head_dim),
        "cos_sin_cache": cos_sin_table(max_seq_len, rotary_dim, device),
        "pos_ids": randint(g, max_seq_len, nnz),
        "paged_kv_cache": tuple(torch.zeros(pages, device=device).to(torch.float8_e4m3fn) for _ in range(2)),
        **{name: tables[name] for name in ("kv_indices", "kv_indptr", "batch_indices", "positions")},
        "is_neox": False,
        "page_size": page_size,
        "kv_layout": "NHD",
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
    return {
        "q_rope": torch.randn(*q, rope_dim, device=device).bfloat16(),
        "k_rope": torch.randn(*k, rope_dim, device=device).bfloat16(),
        "q_nope": torch.randn(*q, q_nope_dim, device=device).bfloat16(),
        "k_nope": torch.randn(*k, k_nope_dim, device=device).bfloat16(),
        "cos_sin_cache": cos_sin_table(max_position, rope_dim, device),
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
        name_prefix=f"{name}_{'latent' if mla else 'heads'}",
        reference=_rope_quantize_fp8_reference,
        check=fp8_check,
        init=_init_quantize,
        description="Rotary embedding of one part of q and k; that part and the other one are quantised to fp8.",
    )


_NOTES = {
    "nnz": "tokens",
    "no_rope_dim": "columns that are not rotated",
    "max_seq_len": "rows of the table",
    "cos_sin_cache": "cosines, then sines",
    "pos_ids": "row of the table for each token",
    "is_neox": "pairs are half the rope columns apart, otherwise neighbours",
    "quant_scale_q": "the queries are multiplied by it before the conversion to fp8",
    "quant_scale_kv": "the same for keys and values",
    "kv_indices": "pages of each request, one request after the other",
    "kv_indptr": "where the pages of each request begin",
    "batch_indices": "request of each token; negative for padding",
    "positions": "slot of each token in its request",
}
_OPTIONS = "is_neox:int32?; quant_scale_q:float32?; quant_scale_kv:float32?"


def _parts_text(key_heads: str, suffix: str = "", end: str = "", nope_end: str = "?") -> str:
    """The four parts of queries and keys, in the notation of templates."""
    q, k = "nnz, num_q_heads", f"nnz{key_heads}"
    parts = {"q_rope": (q, "rope_dim"), "k_rope": (k, "rope_dim"), "q_nope": (q, "no_rope_dim")}
    parts["k_nope"] = (k, "no_rope_dim")
    return "; ".join(
        f"{name}{suffix}[{rows}, {width}]{end.format(name)}{nope_end if 'nope' in name else ''}"
        for name, (rows, width) in parts.items()
    )


def _published_quantize(stem: str, mla: bool) -> TraceTemplate:
    key_heads = "" if mla else ", num_k_heads"
    heads = "_h{num_q_heads}" if mla else "_h{num_q_heads}_kv{num_k_heads}"
    return template_of_text(
        f"{stem}{heads}_rope{{rope_dim}}",
        "rope",
        var="nnz no_rope_dim max_seq_len",
        hidden="rotary_dim",
        inputs=f"{_parts_text(key_heads)}; cos_sin_cache[max_seq_len, rotary_dim]; pos_ids[nnz]; {_OPTIONS}",
        outputs=_parts_text(key_heads, "_out", "<-{}_out:float8_e4m3fn=quantize_dtype", ""),
        notes=_NOTES,
        reference=_rope_quantize_fp8_reference,
        init=_mla_rope_quantize_fp8_init if mla else _rope_quantize_fp8_init,
        check=fp8_check,
        stem=stem,
        description="Rotary embedding of one part of q and k; that part and the other one are quantised to fp8.",
    )


def _widths_agree(arguments: dict[str, Any], *names: str) -> bool:
    """Return True if the tensors that the call has have rows of equal width."""
    return len({arguments[name].shape[-1] for name in names if getattr(arguments.get(name), "shape", ())}) <= 1


def _quantize_dispatch(stem: str, mla: bool) -> TraceDispatch:
    """The published definition has one kind of keys, and parts of the same width in q and k; ours have the rest."""
    published = _published_quantize(stem, mla)
    ours = {is_mla: _quantize_template(stem, is_mla) for is_mla in (True, False)}

    def choose(**arguments: Any) -> TraceTemplate:
        rank = getattr(arguments.get("k_rope"), "ndim", None)
        if rank not in (2, 3):
            raise ArgumentError(f"fi_trace: k_rope must have rank 2 or 3, got {rank}")
        fits = (rank == 2) == mla and _widths_agree(arguments, "q_nope", "k_nope")
        return published if fits else ours[rank == 2]

    return TraceDispatch(choose, (published, *ours.values()))


rope_quantize_fp8_trace = _quantize_dispatch("rope_quantize_fp8", mla=False)
mla_rope_quantize_fp8_trace = _quantize_dispatch("mla_rope_quantize_fp8", mla=True)


def _append_axes(mla: bool, heads_first: bool) -> dict[str, Axis]:
    """Return the axes of a cache (pages, slots and heads in either order, columns), and of values unless for MLA."""
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
        reference=rope_quantize_append_reference,
        check=fp8_check,
        init=_init_append,
        constraints=None if mla else ["head_dim == rope_dim + k_nope_dim"],
        description="Rotary embedding, quantisation to fp8, and append of keys and values to a paged cache.",
    )


_PUBLISHED_APPEND = template_of_text(
    "rope_quantize_fp8_append_paged_kv_cache_h{num_q_heads}_kv{num_k_heads}_rope{rope_dim}_ps{page_size}",
    "rope",
    var="nnz no_rope_dim head_dim max_seq_len num_pages batch_size batch_size_plus_1 num_kv_indices",
    hidden="rotary_dim",
    inputs=f"{_parts_text(', num_k_heads')}; v[nnz, num_k_heads, head_dim]?;"
    "cos_sin_cache[max_seq_len, rotary_dim]; pos_ids[nnz];"
    "k_cache[num_pages, page_size, num_k_heads, head_dim]<-paged_kv_cache[0];"
    "v_cache[num_pages, page_size, num_k_heads, head_dim]<-paged_kv_cache[1];"
    "kv_indices[num_kv_indices]; kv_indptr[batch_size_plus_1]; batch_indices[nnz]; positions[nnz];" + _OPTIONS,
    outputs="q_rope_out[nnz, num_q_heads, rope_dim]<-q_rope_out:float8_e4m3fn=k_cache;"
    "q_nope_out[nnz, num_q_heads, no_rope_dim]<-q_nope_out:float8_e4m3fn=k_cache",
    notes=_NOTES,
    reference=_rope_quantize_fp8_append_paged_kv_cache_reference,
    init=_rope_quantize_fp8_append_paged_kv_cache_init,
    check=fp8_check,
    stem="rope_quantize_fp8_append_paged_kv_cache",
    description="Rotary embedding, quantisation to fp8, and append of keys and values to a paged cache.",
)
_APPEND = {
    "MLA": _append_template(mla=True, heads_first=False),
    "NHD": _append_template(mla=False, heads_first=False),
    "HND": _append_template(mla=False, heads_first=True),
}


def _choose_append(**arguments: Any) -> TraceTemplate:
    """The published definition has keys in the layout NHD, as wide as values, and parts of the same width."""
    k_rope, kv_layout = arguments["k_rope"], arguments.get("kv_layout", "NHD")
    key = "MLA" if k_rope.ndim == 2 else kv_layout
    if key not in _APPEND:
        raise ArgumentError(f"fi_trace: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    caches = dict(zip(("k_cache", "v_cache"), arguments["paged_kv_cache"], strict=True))
    fits = _widths_agree(arguments, "q_nope", "k_nope") and _widths_agree(arguments | caches, "v", *caches)
    return _PUBLISHED_APPEND if key == "NHD" and fits else _APPEND[key]


rope_quantize_fp8_append_paged_kv_cache_trace = TraceDispatch(_choose_append, (_PUBLISHED_APPEND, *_APPEND.values()))
