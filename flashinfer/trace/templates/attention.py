# SPDX-License-Identifier: Apache-2.0
"""The published templates of attention under one name; each is defined with its family."""

from __future__ import annotations

from .attention_blackwell import (
    trtllm_batch_context_trace,
    trtllm_batch_decode_mla_dense_trace,
    trtllm_batch_decode_mla_ragged_trace,
    trtllm_batch_decode_mla_sparse_trace,
    trtllm_batch_decode_mla_trace_dispatch,
    xqa_batch_decode_mla_trace,
)
from .batch_attention import batch_attention_run_trace
from .cascade_attention import multi_level_cascade_run_trace
from .concat_ops import concat_mla_k_trace
from .cudnn import cudnn_batch_decode_trace, cudnn_batch_prefill_trace
from .decode import single_decode_with_kv_cache_trace
from .gemm_grouped import segment_gemm_run_trace
from .gqa import gqa_paged_decode_trace, gqa_paged_prefill_trace, gqa_ragged_prefill_trace
from .mla import mla_paged_decode_trace
from .pod import batch_pod_with_paged_kv_cache_run_trace, pod_with_paged_kv_cache_run_trace
from .prefill import single_prefill_with_kv_cache_trace
from .sparse import block_sparse_attention_run_trace, variable_block_sparse_attention_run_trace
from .xqa import trtllm_batch_decode_block_sparse_trace, trtllm_batch_decode_trace, xqa_batch_decode_trace

__all__ = [
    "batch_attention_run_trace",
    "batch_pod_with_paged_kv_cache_run_trace",
    "block_sparse_attention_run_trace",
    "concat_mla_k_trace",
    "cudnn_batch_decode_trace",
    "cudnn_batch_prefill_trace",
    "gqa_paged_decode_trace",
    "gqa_paged_prefill_trace",
    "gqa_ragged_prefill_trace",
    "mla_paged_decode_trace",
    "multi_level_cascade_run_trace",
    "pod_with_paged_kv_cache_run_trace",
    "segment_gemm_run_trace",
    "single_decode_with_kv_cache_trace",
    "single_prefill_with_kv_cache_trace",
    "trtllm_batch_context_trace",
    "trtllm_batch_decode_block_sparse_trace",
    "trtllm_batch_decode_mla_dense_trace",
    "trtllm_batch_decode_mla_ragged_trace",
    "trtllm_batch_decode_mla_sparse_trace",
    "trtllm_batch_decode_mla_trace_dispatch",
    "trtllm_batch_decode_trace",
    "variable_block_sparse_attention_run_trace",
    "xqa_batch_decode_mla_trace",
    "xqa_batch_decode_trace",
]
