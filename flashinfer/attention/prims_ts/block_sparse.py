# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention of kernels that only Blackwell GPUs have: each name raises when it is called."""

from flashinfer._compat.unsupported import needs

WHAT = "a Blackwell GPU (SM100) and kernels for it, which this package does not have"

BlockSparsePagedTSWrapper = needs("BlockSparsePagedTSWrapper", WHAT)
BlockSparseTSWrapper = needs("BlockSparseTSWrapper", WHAT)
block_sparse_attention = needs("block_sparse_attention", WHAT)
block_sparse_attention_with_paged_kv_cache = needs("block_sparse_attention_with_paged_kv_cache", WHAT)
