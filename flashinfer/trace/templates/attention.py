# SPDX-License-Identifier: Apache-2.0
"""The published templates of attention under one name; each is defined with its family."""

from __future__ import annotations

from .concat_ops import concat_mla_k_trace
from .decode import single_decode_with_kv_cache_trace
from .gemm_grouped import segment_gemm_run_trace
from .gqa import gqa_paged_decode_trace, gqa_paged_prefill_trace, gqa_ragged_prefill_trace
from .prefill import single_prefill_with_kv_cache_trace

__all__ = [
    "concat_mla_k_trace",
    "gqa_paged_decode_trace",
    "gqa_paged_prefill_trace",
    "gqa_ragged_prefill_trace",
    "segment_gemm_run_trace",
    "single_decode_with_kv_cache_trace",
    "single_prefill_with_kv_cache_trace",
]
