# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the append operators that quantise to NVFP4."""

from __future__ import annotations

from typing import Any

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var
from .page_shared import TABLES, append_init, by_cache_form, cache_axes, cache_dims, slots_of, write_slots
from .shared import to_fp8

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


def _append_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_cache_sf: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    heads_first: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, paged_kv_cache.shape[3 if heads_first else 2])
    cache, sf = paged_kv_cache.clone(), kv_cache_sf.clone()
    write_nvfp4(cache[:, 0], sf[:, 0], slots, append_key, k_scale, heads_first)
    write_nvfp4(cache[:, 1], sf[:, 1], slots, append_value, v_scale, heads_first)
    return cache, sf


def _append_pair_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    heads_first: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[2 if heads_first else 1])
    k_cache, v_cache, k_sf, v_sf = k_cache.clone(), v_cache.clone(), k_sf.clone(), v_sf.clone()
    write_nvfp4(k_cache, k_sf, slots, append_key, k_scale, heads_first)
    write_nvfp4(v_cache, v_sf, slots, append_value, v_scale, heads_first)
    return k_cache, v_cache, k_sf, v_sf


def _mapped_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_cache_sf: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    heads_first: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = mapped_slots(slot_mapping, paged_kv_cache.shape[0], paged_kv_cache.shape[3 if heads_first else 2])
    cache, sf = paged_kv_cache.clone(), kv_cache_sf.clone()
    write_nvfp4(cache[:, 0], sf[:, 0], slots, append_key, k_scale, heads_first)
    write_nvfp4(cache[:, 1], sf[:, 1], slots, append_value, v_scale, heads_first)
    return cache, sf


def _mapped_pair_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    heads_first: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = mapped_slots(slot_mapping, k_cache.shape[0], k_cache.shape[2 if heads_first else 1])
    k_cache, v_cache, k_sf, v_sf = k_cache.clone(), v_cache.clone(), k_sf.clone(), v_sf.clone()
    write_nvfp4(k_cache, k_sf, slots, append_key, k_scale, heads_first)
    write_nvfp4(v_cache, v_sf, slots, append_value, v_scale, heads_first)
    return k_cache, v_cache, k_sf, v_sf


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
        reference=_append_pair_reference if pair else _append_reference,
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
        reference=_mapped_pair_reference if pair else _mapped_reference,
        init=_mapped_init,
        description=f"{_DESCRIPTION} given slots.",
    )


nvfp4_quantize_append_paged_kv_cache_trace: TraceDispatch = by_cache_form(_table_template)
nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace: TraceDispatch = by_cache_form(_mapped_template)
