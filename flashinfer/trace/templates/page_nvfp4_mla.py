# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``nvfp4_quantize_append_paged_mla_kv_cache``."""

from __future__ import annotations

from typing import Any, Union

import torch

from ..notation import template_of_text
from .page_nvfp4 import quantize_nvfp4
from .page_shared import TABLE_NOTES, append_tables, slots_of, write_slots
from .shared import normal, seeded, to_fp8

__all__ = ["nvfp4_quantize_append_paged_mla_kv_cache_trace"]


def _reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    ckv_sf_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    ckv_scale: Union[float, torch.Tensor],
    kpe_scale: Union[float, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    caches = (ckv_cache.clone(), ckv_sf_cache.clone(), kpe_cache.clone())
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
    codes, sf = quantize_nvfp4(append_ckv, torch.as_tensor(ckv_scale, dtype=torch.float32, device=append_ckv.device))
    kpe = to_fp8(append_kpe.float() / kpe_scale, torch.float8_e4m3fn)
    for cache, rows in zip(caches, (codes, sf, kpe), strict=True):
        write_slots(cache, slots, rows, 0)
    return caches


def _init(
    *,
    nnz_kv: int,
    batch_size: int = 2,
    page_size: int = 64,
    num_pages: int = 4,
    batch_size_plus_1: int = 0,
    num_kv_indices: int = 0,
    device: Any = "cuda",
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    g, batch_size = seeded(seed, device), batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    num_pages, tables = append_tables(g, nnz_kv, batch_size, page_size, num_pages, num_kv_indices)
    pages = {"ckv_cache": 256, "ckv_sf_cache": 32, "kpe_cache": 64}
    caches = {
        name: torch.zeros(num_pages, page_size, columns, dtype=torch.uint8, device=device)
        for name, columns in pages.items()
    }
    return {
        "append_ckv": normal(g, nnz_kv, 512),
        "append_kpe": normal(g, nnz_kv, 64),
        **{name: tables.pop(name) for name in ("batch_indices", "positions")},
        "ckv_cache": caches["ckv_cache"],
        "ckv_sf_cache": caches["ckv_sf_cache"].view(torch.float8_e4m3fn),
        "kpe_cache": caches["kpe_cache"].view(torch.float8_e4m3fn),
        **tables,
        "ckv_scale": 1.0,
        "kpe_scale": 1.0,
    }


_PAGES = "[num_pages, page_size, "

nvfp4_quantize_append_paged_mla_kv_cache_trace = template_of_text(
    "nvfp4_quantize_append_paged_mla_kv_cache_ckv{head_dim_ckv}_kpe{head_dim_kpe}",
    "page_append",
    var="nnz_kv num_pages page_size batch_size batch_size_plus_1 num_kv_indices",
    hidden="packed_ckv num_blocks",
    inputs="append_ckv[nnz_kv, head_dim_ckv]; append_kpe[nnz_kv, head_dim_kpe];"
    f"batch_indices[nnz_kv]; positions[nnz_kv]; ckv_cache{_PAGES}packed_ckv]; ckv_sf_cache{_PAGES}num_blocks];"
    f"kpe_cache{_PAGES}head_dim_kpe]; kv_indices[num_kv_indices]; kv_indptr[batch_size_plus_1];"
    "kv_last_page_len[batch_size]; ckv_scale:float32; kpe_scale:float32",
    outputs=f"ckv_cache{_PAGES}packed_ckv]<-ckv_cache; ckv_sf_cache{_PAGES}num_blocks]<-ckv_sf_cache;"
    f"kpe_cache{_PAGES}head_dim_kpe]<-kpe_cache",
    notes=TABLE_NOTES,
    reference=_reference,
    init=_init,
    constraints=["batch_size_plus_1 == batch_size + 1"],
    stem="nvfp4_quantize_append_paged_mla_kv_cache",
    description="Write compressed keys in NVFP4 and their rotary parts in e4m3 into the pages of their requests.",
)
