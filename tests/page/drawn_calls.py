# SPDX-License-Identifier: Apache-2.0
"""Calls of paged caches for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer

from ..traced_calls import traced

_PAGES = {"nnz_kv": (0, 1, 9, 33), "batch_size": (1, 3), "page_size": (1, 4, 16), "num_pages": (4, 12)}
_HEADS = {"num_kv_heads": (1, 2), "head_dim": (16, 64)}
#: The first is never read, of the next two what rows need; rows of a negative request are skipped.
_UNREAD = ("kv_last_page_len", "kv_indices", "kv_indptr", "batch_indices")


def _lengths(batch: int) -> dict[str, Any]:
    pages = torch.randint(0, 5, (batch,))
    indptr = torch.zeros(batch + 1, dtype=torch.int32)
    indptr[1:] = pages.cumsum(0)
    return {"kv_indptr": indptr, "kv_last_page_len": torch.randint(1, 5, (batch,)).int(), "page_size": 4}


CALLS = {
    "append_paged_kv_cache": traced(flashinfer.append_paged_kv_cache, any_number=_UNREAD, **_PAGES, **_HEADS),
    "append_paged_mla_kv_cache": traced(flashinfer.append_paged_mla_kv_cache, any_number=_UNREAD, **_PAGES),
    "get_batch_indices_positions": traced(
        flashinfer.get_batch_indices_positions,
        any_number=("append_indptr", "seq_lens"),
        more=lambda draw, made: {"nnz": int(made["append_indptr"][-1])},
        batch_size=(1, 3),
        nnz=(0, 1, 33),
    ),
    "get_seq_lens": traced(
        flashinfer.get_seq_lens, any_number=("kv_indptr", "kv_last_page_len"), init=_lengths, batch=(0, 1, 3)
    ),
    "nvfp4_quantize_append_paged_kv_cache": traced(
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache, any_number=_UNREAD, **_PAGES, **_HEADS
    ),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": traced(
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
        any_number=("slot_mapping",),
        nnz_kv=(0, 1, 9, 33),
        page_size=(1, 4, 16),
        num_pages=(4, 12),
        **_HEADS,
    ),
}
