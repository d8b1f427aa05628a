# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports index scores."""

from flashinfer.indexer import (
    compute_paged_mqa_logits_schedule,
    fp4_paged_mqa_logits,
    fp8_paged_mqa_logits,
    min_block_table_width,
    padded_seq_len,
    precompile_paged_mqa_logits,
)

__all__ = [
    "compute_paged_mqa_logits_schedule",
    "fp4_paged_mqa_logits",
    "fp8_paged_mqa_logits",
    "min_block_table_width",
    "padded_seq_len",
    "precompile_paged_mqa_logits",
]
