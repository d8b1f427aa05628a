# SPDX-License-Identifier: Apache-2.0
"""Calls of rotary embeddings for test_drawn_calls.py."""

from __future__ import annotations

import flashinfer

from ..traced_calls import traced

_HEADS = {"num_q_heads": (1, 4), "num_k_heads": (1, 2), "head_dim": (64, 96, 128)}
_TOKENS = {"nnz": (0, 1, 9, 33)}
_OFFSETS = {**_TOKENS, "batch_size": (1, 3), **_HEADS}
_POSITIONS = {**_TOKENS, **_HEADS}
_TABLE = {**_TOKENS, "max_seq_len": (1, 64)}
_QUANTIZED = {
    **_TOKENS,
    "num_q_heads": (1, 4),
    "num_k_heads": (1, 2),
    "no_rope_dim": (0, 16, 64),
    "max_seq_len": (8, 64),
}

CALLS = {
    "apply_rope": traced(flashinfer.apply_rope, any_number=("offsets", "indptr"), **_OFFSETS),
    "apply_rope_inplace": traced(flashinfer.apply_rope_inplace, any_number=("offsets", "indptr"), **_OFFSETS),
    "apply_rope_pos_ids": traced(flashinfer.apply_rope_pos_ids, any_number=("pos_ids",), **_POSITIONS),
    "apply_rope_pos_ids_inplace": traced(flashinfer.apply_rope_pos_ids_inplace, any_number=("pos_ids",), **_POSITIONS),
    "apply_llama31_rope": traced(flashinfer.apply_llama31_rope, any_number=("offsets", "indptr"), **_OFFSETS),
    "apply_llama31_rope_pos_ids": traced(flashinfer.apply_llama31_rope_pos_ids, any_number=("pos_ids",), **_POSITIONS),
    "apply_rope_with_cos_sin_cache": traced(flashinfer.apply_rope_with_cos_sin_cache, **_TABLE),
    "apply_rope_with_cos_sin_cache_inplace": traced(flashinfer.apply_rope_with_cos_sin_cache_inplace, **_TABLE),
    "rope_quantize_fp8": traced(flashinfer.rope.rope_quantize_fp8, **_QUANTIZED),
    "mla_rope_quantize_fp8": traced(
        flashinfer.rope.mla_rope_quantize_fp8, **_TOKENS, num_q_heads=(1, 4), no_rope_dim=(64, 512), max_seq_len=(8, 64)
    ),
    "rope_quantize_fp8_append_paged_kv_cache": traced(
        flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache,
        any_number=("kv_indices",),
        **_QUANTIZED,
        page_size=(1, 4, 16),
        num_pages=(8, 40),
    ),
}
