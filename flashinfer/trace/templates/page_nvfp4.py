# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the append operators that quantise to NVFP4."""

from __future__ import annotations

from typing import Any

import torch

from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var
from .page_shared import (
    TABLE_NOTES,
    TABLES,
    Cache,
    append_init,
    append_tables,
    by_cache_form,
    cache_axes,
    cache_dims,
    halves_of,
    slots_of,
    write_slots,
)
from .shared import normal, seeded, to_fp8

__all__ = [
    "nvfp4_quantize_append_paged_kv_cache_trace",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace",
]


def quantize_nvfp4(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes and the e4m3 scales of blocks of 16; ties go to the even code."""
    blocks = x.float().unflatten(-1, (-1, 16))
    sf = to_fp8(blocks.abs().amax(dim=-1) / (6.0 * scale), torch.float8_e4m3fn)
    magnitude = blocks.abs() / (sf.float() * scale).unsqueeze(-1)
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=x.device)
    for i, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += magnitude > limit if i % 2 == 0 else magnitude >= limit
    codes += torch.signbit(blocks) * 8
    codes = torch.where(sf.float().unsqueeze(-1) == 0, 0, codes).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), sf


def mapped_slots(
    slot_mapping: torch.Tensor, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are written, and the page and the entry of each."""
    rows = torch.nonzero((slot_mapping >= 0) & (slot_mapping < num_pages * page_size)).flatten()
    slots = slot_mapping[rows].long()
    return rows, slots // page_size, slots % page_size


def write_nvfp4(
    cache: torch.Tensor,
    sf: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    values: torch.Tensor,
    scale: torch.Tensor | float,
    heads_first: int,
) -> None:
    """Rows of values, quantised, into their slots."""
    factor = torch.as_tensor(scale, dtype=torch.float32, device=values.device).reshape(())
    codes, scales = quantize_nvfp4(values, factor)
    write_slots(cache, slots, codes, heads_first)
    write_slots(sf, slots, scales, heads_first)


def _appended(
    rows: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[Cache, Cache],
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | float, torch.Tensor | float],
    heads_first: int,
) -> tuple[torch.Tensor, ...]:
    """Copies of the caches of codes and of scales with the rows written: two tensors, or four when they are pairs."""
    copies = [tuple(t.clone() for t in cache) if isinstance(cache, tuple) else cache.clone() for cache in caches]
    for values, codes, sf, scale in zip(rows, *(halves_of(cache) for cache in copies), scales, strict=True):
        write_nvfp4(codes, sf, slots, values, scale, heads_first)
    return tuple(t for cache in copies for t in (cache if isinstance(cache, tuple) else (cache,)))


def _nvfp4_quantize_append_paged_kv_cache_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    heads_first: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    page_size = halves_of(paged_kv_cache)[0].shape[2 if heads_first else 1]
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, page_size)
    caches, scales = (paged_kv_cache, kv_cache_sf), (k_scale, v_scale)
    return _appended((append_key, append_value), caches, slots, scales, heads_first)


def _mapped_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    heads_first: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    half = halves_of(paged_kv_cache)[0]
    slots = mapped_slots(slot_mapping, half.shape[0], half.shape[2 if heads_first else 1])
    caches, scales = (paged_kv_cache, kv_cache_sf), (k_scale, v_scale)
    return _appended((append_key, append_value), caches, slots, scales, heads_first)


def _axes(layout: str, pair: bool) -> dict[str, Axis]:
    sizes: dict[str, Axis] = {
        "head_bytes": Const("head_dim / 2", abbrev=""),
        "head_scales": Const("head_dim / 16", abbrev=""),
    }
    return {**cache_axes(layout, pair), **sizes}


def _caches(layout: str, pair: bool, suffix: str = "") -> dict[str, Value]:
    """The caches of codes and of scales; ``suffix`` makes outputs of them."""
    codes, scales = cache_dims(layout, pair, "head_bytes"), cache_dims(layout, pair, "head_scales")
    entries: dict[str, Value] = {}
    for names, dims, param, dtype in (
        (("k_cache", "v_cache") if pair else ("paged_kv_cache",), codes, "paged_kv_cache", "uint8"),
        (("k_sf", "v_sf") if pair else ("kv_cache_sf",), scales, "kv_cache_sf", "float8_e4m3fn"),
    ):
        for i, name in enumerate(names):
            entries[name + suffix] = Tensor(dims, param=param, tuple_idx=i if pair else None, dtype=dtype)
    return entries


_ROWS = Tensor(("nnz", "num_kv_heads", "head_dim"))
_DESCRIPTION = "Quantise keys and values to NVFP4 and write them into"


def _table_template(layout: str, pair: bool) -> TraceTemplate:
    prefix = f"nvfp4_quantize_append_paged_kv_cache_{layout.lower()}{'_pair' if pair else ''}"
    return TraceTemplate(
        "append_paged_kv_cache",
        axes=_axes(layout, pair),
        inputs={
            "append_key": _ROWS,
            "append_value": _ROWS,
            "batch_indices": TABLES["batch_indices"],
            "positions": TABLES["positions"],
            **_caches(layout, pair),
            "kv_indices": TABLES["kv_indices"],
            "kv_indptr": TABLES["kv_indptr"],
            "kv_last_page_len": TABLES["kv_last_page_len"],
            "k_scale": Scalar(),
            "v_scale": Scalar(),
        },
        outputs=_caches(layout, pair, "_out"),
        name_prefix=prefix,
        reference=_nvfp4_quantize_append_paged_kv_cache_reference,
        init=append_init,
        description=f"{_DESCRIPTION} the pages of their requests.",
    )


def _mapped_init(num_slots: int, num_pages: int, page_size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Slots in any order; the first row has none."""
    slots = torch.randperm(num_pages * page_size, device=device)[:num_slots]
    slots[:1] = -1
    return {"slot_mapping": slots.to(torch.int32)}


def _mapped_template(layout: str, pair: bool) -> TraceTemplate:
    prefix = f"nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_{layout.lower()}{'_pair' if pair else ''}"
    axes = _axes(layout, pair)
    for unused in ("num_indices", "indptr_len", "batch_size"):
        axes.pop(unused)
    return TraceTemplate(
        "append_paged_kv_cache",
        axes={**axes, "num_slots": Var("rows that are written; nnz may be more")},
        inputs={
            "append_key": _ROWS,
            "append_value": _ROWS,
            "slot_mapping": Tensor(("num_slots",), dtype="int32", description="page * page_size + entry"),
            **_caches(layout, pair),
            "k_scale": Tensor((), dtype="float32"),
            "v_scale": Tensor((), dtype="float32"),
        },
        outputs=_caches(layout, pair, "_out"),
        name_prefix=prefix,
        reference=_mapped_reference,
        init=_mapped_init,
        description=f"{_DESCRIPTION} given slots.",
    )


def _caches_init(g: torch.Generator, num_pages: int, page_size: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Empty caches of codes and of scales, each a pair."""
    pages = (num_pages, page_size, heads)
    codes = [torch.zeros(*pages, head_dim // 2, dtype=torch.uint8, device=g.device) for _ in range(2)]
    scales = [torch.zeros(*pages, head_dim // 16, device=g.device).to(torch.float8_e4m3fn) for _ in range(2)]
    return {"paged_kv_cache": tuple(codes), "kv_cache_sf": tuple(scales)}


def _nvfp4_quantize_append_paged_kv_cache_init(
    *,
    nnz_kv: int,
    batch_size: int = 2,
    num_kv_heads: int = 8,
    head_dim: int = 64,
    page_size: int = 16,
    num_pages: int = 4,
    batch_size_plus_1: int = 0,
    num_kv_indices: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, batch_size = seeded(seed, device), batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    num_pages, tables = append_tables(g, nnz_kv, batch_size, page_size, num_pages, num_kv_indices)
    caches = _caches_init(g, num_pages, page_size, num_kv_heads, head_dim)
    return {
        "append_key": normal(g, nnz_kv, num_kv_heads, head_dim),
        "append_value": normal(g, nnz_kv, num_kv_heads, head_dim),
        **{name: tables.pop(name) for name in ("batch_indices", "positions")},
        "paged_kv_cache": caches["paged_kv_cache"],
        **tables,
        "kv_cache_sf": caches["kv_cache_sf"],
        "k_scale": 0.5,
        "v_scale": 0.25,
    }


def _nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_init(
    *,
    nnz_kv: int,
    num_kv_heads: int = 8,
    head_dim: int = 64,
    page_size: int = 16,
    num_pages: int = 4,
    one: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Slots in any order, and as many pages as they need."""
    g, num_pages = seeded(seed, device), max(num_pages, -(-nnz_kv // page_size))
    slots = torch.randperm(num_pages * page_size, generator=g, device=device)[:nnz_kv]
    return {
        "append_key": normal(g, nnz_kv, num_kv_heads, head_dim),
        "append_value": normal(g, nnz_kv, num_kv_heads, head_dim),
        "slot_mapping": slots.int(),
        **_caches_init(g, num_pages, page_size, num_kv_heads, head_dim),
        "k_scale": torch.full((one,), 0.5, device=device),
        "v_scale": torch.full((one,), 0.25, device=device),
    }


_NAME = "_kv{num_kv_heads}_d{head_dim}_pd{packed_head_dim}_sd{scale_dim}_ps{page_size}"
_PAIRS = {
    name: f"{name}[num_pages, page_size, num_kv_heads, {width}]<-{param}"
    for name, width, param in (
        ("paged_k_cache", "packed_head_dim", "paged_kv_cache[0]"),
        ("paged_v_cache", "packed_head_dim", "paged_kv_cache[1]"),
        ("k_scale_cache", "scale_dim", "kv_cache_sf[0]"),
        ("v_scale_cache", "scale_dim", "kv_cache_sf[1]"),
    )
}
_DTYPES = {"p": "uint8", "k": "float8_e4m3fn", "v": "float8_e4m3fn"}
_WRITTEN = "; ".join(f"{text}:{_DTYPES[name[0]]}" for name, text in _PAIRS.items())
_APPENDED = "append_key[nnz_kv, num_kv_heads, head_dim]; append_value[nnz_kv, num_kv_heads, head_dim]"
_PACKING = ["packed_head_dim * 2 == head_dim", "scale_dim * 16 == head_dim"]

_PUBLISHED = template_of_text(
    f"nvfp4_quantize_append_paged_kv_cache{_NAME}",
    "page_append",
    var="nnz_kv num_pages batch_size batch_size_plus_1 num_kv_indices",
    inputs=f"{_APPENDED}; batch_indices[nnz_kv]; positions[nnz_kv]; {'; '.join(_PAIRS.values())};"
    "kv_indices[num_kv_indices]; kv_indptr[batch_size_plus_1]; kv_last_page_len[batch_size];"
    "k_scale:float64; v_scale:float64",
    outputs=_WRITTEN,
    notes=TABLE_NOTES,
    reference=_nvfp4_quantize_append_paged_kv_cache_reference,
    init=_nvfp4_quantize_append_paged_kv_cache_init,
    constraints=["batch_size_plus_1 == batch_size + 1", *_PACKING],
    description=f"{_DESCRIPTION} the pages of their requests.",
)
_PUBLISHED_MAPPED = template_of_text(
    f"nvfp4_quantize_append_paged_kv_cache_with_slot_mapping{_NAME}",
    "page_append",
    var="nnz_kv num_pages",
    hidden="one",
    inputs=f"{_APPENDED}; slot_mapping[nnz_kv]; {'; '.join(_PAIRS.values())}; k_scale[one]; v_scale[one]",
    outputs=_WRITTEN,
    notes={"slot_mapping": "page * page_size + entry"},
    reference=_mapped_reference,
    init=_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_init,
    constraints=["one == 1", *_PACKING],
    description=f"{_DESCRIPTION} given slots.",
)


def _mapped_as_published(arguments: dict[str, Any]) -> bool:
    """Return True if the scales are tensors of one element, and each row has a slot."""
    scales = (arguments.get("k_scale"), arguments.get("v_scale"))
    rows, slots = (getattr(arguments.get(name), "shape", (0,))[0] for name in ("append_key", "slot_mapping"))
    return rows == slots and all(getattr(scale, "shape", None) == (1,) for scale in scales)


nvfp4_quantize_append_paged_kv_cache_trace: TraceDispatch = by_cache_form(_table_template, _PUBLISHED)
nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace: TraceDispatch = by_cache_form(
    _mapped_template, _PUBLISHED_MAPPED, _mapped_as_published
)
