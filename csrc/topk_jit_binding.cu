// SPDX-License-Identifier: Apache-2.0
// Exports of the topk module.
#include "tvm_ffi_utils.h"

void top_k(TensorView values, TensorView indices, TensorView input, int64_t k, int64_t order, bool prefer_large_indices,
           int64_t capacity, int64_t blocks_per_row);
void top_k_page_table_transform(TensorView out, Optional<TensorView> out_raw_indices, TensorView input,
                                TensorView src_page_table, TensorView lengths, Optional<TensorView> row_to_batch,
                                Optional<TensorView> row_starts, Optional<TensorView> page_table_row_starts, int64_t k,
                                int64_t page_shift, int64_t order, bool prefer_large_indices, int64_t capacity,
                                int64_t blocks_per_row);
void top_k_ragged_transform(TensorView out, TensorView input, TensorView offsets, TensorView lengths,
                            Optional<TensorView> row_starts, int64_t k, int64_t order, bool prefer_large_indices,
                            int64_t capacity, int64_t blocks_per_row);
void top_k_varlen(TensorView out_indices, Optional<TensorView> out_values, TensorView logits, TensorView seq_lens,
                  int64_t k, int64_t compress_ratio, int64_t next_n, int64_t capacity, int64_t blocks_per_row);

FLASHINFER_EXPORT(top_k, top_k)
FLASHINFER_EXPORT(top_k_page_table_transform, top_k_page_table_transform)
FLASHINFER_EXPORT(top_k_ragged_transform, top_k_ragged_transform)
FLASHINFER_EXPORT(top_k_varlen, top_k_varlen)
