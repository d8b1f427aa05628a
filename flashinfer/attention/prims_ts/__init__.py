# SPDX-License-Identifier: Apache-2.0
"""Published path of attention whose kernels only Blackwell GPUs have: each name raises when it is called."""

from flashinfer._compat.unsupported import needs

from .block_sparse import WHAT
from .block_sparse import BlockSparsePagedTSWrapper as BlockSparsePagedTSWrapper
from .block_sparse import BlockSparseTSWrapper as BlockSparseTSWrapper
from .block_sparse import block_sparse_attention as block_sparse_attention
from .block_sparse import block_sparse_attention_with_paged_kv_cache as block_sparse_attention_with_paged_kv_cache

BatchDecodePagedTSWrapper = needs("BatchDecodePagedTSWrapper", WHAT)
BatchMLADecodePagedTSWrapper = needs("BatchMLADecodePagedTSWrapper", WHAT)
BatchPrefillPagedTSWrapper = needs("BatchPrefillPagedTSWrapper", WHAT)
BatchPrefillTSWrapper = needs("BatchPrefillTSWrapper", WHAT)
batch_decode_mla_with_paged_kv_cache = needs("batch_decode_mla_with_paged_kv_cache", WHAT)
batch_decode_with_paged_kv_cache = needs("batch_decode_with_paged_kv_cache", WHAT)
batch_prefill = needs("batch_prefill", WHAT)
batch_prefill_with_paged_kv_cache = needs("batch_prefill_with_paged_kv_cache", WHAT)
