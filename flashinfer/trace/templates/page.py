# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.page``.

A cache comes as one tensor or as a pair, in one of two layouts. The published definition is that of a pair in the
layout NHD; the other forms have definitions of ours with the same reference, which the const axis ``heads_first`` tells
the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from ..notation import template_of_text
from ..template import Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_blackwell import xqa_mla_trace
from .fmha_v2 import trtllm_fmha_v2_prefill_trace
from .page_nvfp4 import (
    nvfp4_quantize_append_paged_kv_cache_trace,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace,
)
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
from .shared import normal, seeded
from .xqa import xqa_trace

__all__ = [
    "append_paged_kv_cache_trace",
    "append_paged_mla_kv_cache_trace",
    "get_batch_indices_positions_trace",
    "get_seq_lens_trace",
    "nvfp4_quantize_append_paged_kv_cache_trace",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_trace",
    "trtllm_fmha_v2_prefill_trace",
    "xqa_mla_trace",
    "xqa_trace",
]


def _append_paged_kv_cache_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    heads_first: int = 0,
    **_: Any,
) -> Cache:
    """Writes to the cache, as the API does. A cache of four dimensions, as in the published definition, is keys."""
    halves, heads_first = halves_of(paged_kv_cache), int(heads_first or kv_layout == "HND")
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, halves[0].shape[2 if heads_first else 1])
    for half, rows in zip(halves, (append_key, append_value), strict=False):
        write_slots(half, slots, rows, heads_first)
    return paged_kv_cache


def _append_paged_mla_kv_cache_reference(
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
    """Writes to the caches, as the API does."""
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
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
        reference=_append_paged_kv_cache_reference,
        init=append_init,
        description="Write keys and values into the pages of their requests.",
    )


def _append_paged_kv_cache_init(
    *,
    nnz_kv: int,
    batch_size: int = 2,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 4,
    batch_size_plus_1: int = 0,
    num_kv_indices: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, batch_size = seeded(seed, device), batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    num_pages, tables = append_tables(g, nnz_kv, batch_size, page_size, num_pages, num_kv_indices)
    pages = (num_pages, page_size, num_kv_heads, head_dim)
    return {
        "append_key": normal(g, nnz_kv, num_kv_heads, head_dim),
        "append_value": normal(g, nnz_kv, num_kv_heads, head_dim),
        **{name: tables.pop(name) for name in ("batch_indices", "positions")},
        "paged_kv_cache": (normal(g, *pages), normal(g, *pages)),
        **tables,
    }


def _append_paged_mla_kv_cache_init(
    *,
    nnz_kv: int,
    batch_size: int = 2,
    head_dim_ckv: int = 512,
    head_dim_kpe: int = 64,
    page_size: int = 64,
    num_pages: int = 4,
    batch_size_plus_1: int = 0,
    num_kv_indices: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, batch_size = seeded(seed, device), batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    num_pages, tables = append_tables(g, nnz_kv, batch_size, page_size, num_pages, num_kv_indices)
    return {
        "append_ckv": normal(g, nnz_kv, head_dim_ckv),
        "append_kpe": normal(g, nnz_kv, head_dim_kpe),
        **{name: tables.pop(name) for name in ("batch_indices", "positions")},
        "ckv_cache": normal(g, num_pages, page_size, head_dim_ckv),
        "kpe_cache": normal(g, num_pages, page_size, head_dim_kpe),
        **tables,
    }


_WHERE = "batch_indices[nnz_kv]; positions[nnz_kv]"
_TABLE = "kv_indices[num_kv_indices]; kv_indptr[batch_size_plus_1]; kv_last_page_len[batch_size]"
_ROWS = "[nnz_kv, num_kv_heads, head_dim]"

append_paged_kv_cache_trace: TraceDispatch = by_cache_form(
    _append_template,
    template_of_text(
        "append_paged_kv_cache_kv{num_kv_heads}_d{head_dim}_ps{page_size}",
        "page_append",
        var="nnz_kv num_pages batch_size batch_size_plus_1 num_kv_indices",
        inputs=f"append_key{_ROWS}; append_value{_ROWS}; {_WHERE};"
        f"paged_kv_cache[num_pages, (page_size), num_kv_heads, head_dim]; {_TABLE}",
        outputs="paged_kv_cache[num_pages, page_size, num_kv_heads, head_dim]<-paged_kv_cache",
        notes=TABLE_NOTES | {"paged_kv_cache": "a pair of such tensors, keys and values"},
        reference=_append_paged_kv_cache_reference,
        init=_append_paged_kv_cache_init,
        constraints=["batch_size_plus_1 == batch_size + 1"],
        stem="append_paged_kv_cache",
        description="Write keys and values into the pages of their requests.",
    ),
)

append_paged_mla_kv_cache_trace = template_of_text(
    "append_paged_mla_kv_cache_ckv{head_dim_ckv}_kpe{head_dim_kpe}",
    "page_append",
    var="nnz_kv num_pages page_size batch_size batch_size_plus_1 num_kv_indices",
    inputs=f"append_ckv[nnz_kv, head_dim_ckv]; append_kpe[nnz_kv, head_dim_kpe]; {_WHERE};"
    f"ckv_cache[num_pages, page_size, head_dim_ckv]?; kpe_cache[num_pages, page_size, head_dim_kpe]?; {_TABLE}",
    outputs="ckv_cache[num_pages, page_size, head_dim_ckv]<-ckv_cache;"
    "kpe_cache[num_pages, page_size, head_dim_kpe]<-kpe_cache",
    notes=TABLE_NOTES,
    reference=_append_paged_mla_kv_cache_reference,
    init=_append_paged_mla_kv_cache_init,
    constraints=["batch_size_plus_1 == batch_size + 1"],
    stem="append_paged_mla_kv_cache",
    description="Write compressed keys and their rotary parts into the pages of their requests.",
)


def _indices_init(*, batch_size: int, nnz: int, indptr_len: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return indices of a batch in which each request has three tokens and gets ``nnz // batch_size`` more rows."""
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
