# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.page``.

A cache comes as one tensor or as a pair, in one of two layouts. Templates of either form share a reference, which the
const axis ``heads_first`` tells the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .page_nvfp4 import (
    nvfp4_quantize_append_paged_kv_cache_trace,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace,
)
from .page_shared import (
    TABLES,
    append_init,
    by_cache_form,
    cache_axes,
    cache_dims,
    slots_of,
    write_slots,
)

__all__ = [
    "append_paged_kv_cache_trace",
    "append_paged_mla_kv_cache_trace",
    "get_batch_indices_positions_trace",
    "get_seq_lens_trace",
    "nvfp4_quantize_append_paged_kv_cache_trace",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace",
]


def _append_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    heads_first: int,
    **_: Any,
) -> torch.Tensor:
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, paged_kv_cache.shape[3 if heads_first else 2])
    cache = paged_kv_cache.clone()
    for half, rows in enumerate((append_key, append_value)):
        write_slots(cache[:, half], slots, rows, heads_first)
    return cache


def _append_pair_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    heads_first: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[2 if heads_first else 1])
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    write_slots(k_cache, slots, append_key, heads_first)
    write_slots(v_cache, slots, append_value, heads_first)
    return k_cache, v_cache


def _append_mla_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
    ckv_cache, kpe_cache = ckv_cache.clone(), kpe_cache.clone()
    write_slots(ckv_cache, slots, append_ckv, 0)
    write_slots(kpe_cache, slots, append_kpe, 0)
    return ckv_cache, kpe_cache


def _batch_indices_positions_reference(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_indices = torch.full((nnz,), -1, dtype=torch.int32, device=append_indptr.device)
    positions = torch.zeros_like(batch_indices)
    for b, (begin, end) in enumerate(zip(append_indptr[:-1].tolist(), append_indptr[1:].tolist(), strict=True)):
        rows = torch.arange(max(begin, 0), max(min(end, nnz), max(begin, 0)), device=append_indptr.device)
        batch_indices[rows] = b
        positions[rows] = (rows + seq_lens[b] - end).to(torch.int32)
    return batch_indices, positions


def _seq_lens_reference(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, **_: Any
) -> torch.Tensor:
    return torch.clamp(kv_indptr.diff() - 1, min=0) * page_size + kv_last_page_len


def _append_template(layout: str, pair: bool) -> TraceTemplate:
    rows = Tensor(("nnz", "num_kv_heads", "head_dim"))
    dims = cache_dims(layout, pair, "head_dim")
    names = ("k_cache", "v_cache") if pair else ("paged_kv_cache",)
    caches = {
        name: Tensor(dims, param="paged_kv_cache", tuple_idx=i if pair else None, may_lack="page_size")
        for i, name in enumerate(names)
    }
    outputs = {
        f"{name}_out": Tensor(dims, param="paged_kv_cache", tuple_idx=i if pair else None, dtype_from="append_key")
        for i, name in enumerate(names)
    }
    return TraceTemplate(
        "append_paged_kv_cache",
        axes=cache_axes(layout, pair),
        inputs={
            "append_key": rows,
            "append_value": rows,
            "batch_indices": TABLES["batch_indices"],
            "positions": TABLES["positions"],
            **caches,
            "kv_indices": TABLES["kv_indices"],
            "kv_indptr": TABLES["kv_indptr"],
            "kv_last_page_len": TABLES["kv_last_page_len"],
        },
        outputs=outputs,
        name_prefix=f"append_paged_kv_cache_{layout.lower()}{'_pair' if pair else ''}",
        reference=_append_pair_reference if pair else _append_reference,
        init=append_init,
        description="Write keys and values into the pages of their requests.",
    )


append_paged_kv_cache_trace: TraceDispatch = by_cache_form(_append_template)

append_paged_mla_kv_cache_trace = TraceTemplate(
    "append_paged_mla_kv_cache",
    axes={
        "nnz": Var("rows"),
        "head_dim_ckv": Const(abbrev="ckv"),
        "head_dim_kpe": Const(abbrev="kpe"),
        "num_pages": Var(),
        "page_size": Const(abbrev="ps"),
        "num_indices": Var(),
        "indptr_len": Var("batch_size + 1"),
        "batch_size": Var(),
    },
    inputs={
        "append_ckv": Tensor(("nnz", "head_dim_ckv")),
        "append_kpe": Tensor(("nnz", "head_dim_kpe")),
        "batch_indices": TABLES["batch_indices"],
        "positions": TABLES["positions"],
        "ckv_cache": Tensor(("num_pages", "page_size", "head_dim_ckv")),
        "kpe_cache": Tensor(("num_pages", "page_size", "head_dim_kpe")),
        "kv_indices": TABLES["kv_indices"],
        "kv_indptr": TABLES["kv_indptr"],
        "kv_last_page_len": TABLES["kv_last_page_len"],
    },
    outputs={
        "ckv_cache_out": Tensor(("num_pages", "page_size", "head_dim_ckv"), param="ckv_cache", dtype_from="append_ckv"),
        "kpe_cache_out": Tensor(("num_pages", "page_size", "head_dim_kpe"), param="kpe_cache", dtype_from="append_kpe"),
    },
    reference=_append_mla_reference,
    init=append_init,
    description="Write compressed keys and their rotary parts into the pages of their requests.",
)


def _indices_init(batch_size: int, nnz: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """As many rows per request as fit, the rest without one; every request had three tokens before."""
    each = nnz // batch_size
    append_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * each
    return {
        "append_indptr": append_indptr,
        "seq_lens": torch.full((batch_size,), each + 3, dtype=torch.int32, device=device),
    }


get_batch_indices_positions_trace = TraceTemplate(
    "get_batch_indices_positions",
    axes={"indptr_len": Var("batch_size + 1"), "batch_size": Var(), "nnz": Var("rows")},
    inputs={
        "append_indptr": Tensor(("indptr_len",), dtype="int32"),
        "seq_lens": Tensor(("batch_size",), dtype="int32", description="lengths after the append"),
        "nnz": Scalar("int32"),
    },
    outputs={
        "batch_indices": Tensor(("nnz",), param="batch_indices", dtype="int32"),
        "positions": Tensor(("nnz",), param="positions", dtype="int32"),
    },
    reference=_batch_indices_positions_reference,
    init=_indices_init,
    description="Request and position of each row of a ragged batch; -1 and 0 for rows of no request.",
)

get_seq_lens_trace = TraceTemplate(
    "get_seq_lens",
    axes={"indptr_len": Var("batch_size + 1"), "batch_size": Var()},
    inputs={
        "kv_indptr": TABLES["kv_indptr"],
        "kv_last_page_len": TABLES["kv_last_page_len"],
        "page_size": Scalar("int32"),
    },
    outputs={"seq_lens": Tensor(("batch_size",), dtype_from="kv_indptr")},
    reference=_seq_lens_reference,
    description="Tokens of each request in a paged cache.",
)
