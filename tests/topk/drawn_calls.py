# SPDX-License-Identifier: Apache-2.0
"""Calls of top-k for test_drawn_calls.py."""

from __future__ import annotations

import flashinfer

from ..traced_calls import traced

_SIZES = {"num_rows": (1, 5), "max_len": (1, 64, 300), "k": (1, 8, 40)}
#: Lengths are clamped to the columns, offsets are added to the result, entries of a page table are copied.
_NUMBERS = ("lengths", "seq_lens", "offsets", "src_page_table")

CALLS = {
    "top_k": traced(flashinfer.top_k, more=lambda draw, made: {"k": 1}, batch_size=(0, 1, 5), vocab_size=(1, 64, 2051)),
    "top_k_page_table_transform": traced(
        flashinfer.top_k_page_table_transform, any_number=_NUMBERS, batch_size=(1, 5), page_size=(1, 4), **_SIZES
    ),
    "top_k_ragged_transform": traced(flashinfer.top_k_ragged_transform, any_number=_NUMBERS, **_SIZES),
    "top_k_varlen": traced(
        flashinfer.top_k_varlen, any_number=_NUMBERS, batch_size=(1, 5), max_seq_len=(64, 300), top_k=(1, 8, 40)
    ),
}
