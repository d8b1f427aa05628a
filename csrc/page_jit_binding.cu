// SPDX-License-Identifier: Apache-2.0
// Exports of the page module.
#include "tvm_ffi_utils.h"

void append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView batch_indices,
                           TensorView positions, TensorView cache, Optional<TensorView> value_cache,
                           TensorView kv_indices, TensorView kv_indptr, bool is_hnd, bool validate);
void append_paged_mla_kv_cache(TensorView append_ckv, TensorView append_kpe, TensorView batch_indices,
                               TensorView positions, TensorView ckv_cache, TensorView kpe_cache, TensorView kv_indices,
                               TensorView kv_indptr, bool validate);
void get_batch_indices_positions(TensorView append_indptr, TensorView seq_lens, TensorView batch_indices,
                                 TensorView positions);

FLASHINFER_EXPORT(append_paged_kv_cache, append_paged_kv_cache)
FLASHINFER_EXPORT(append_paged_mla_kv_cache, append_paged_mla_kv_cache)
FLASHINFER_EXPORT(get_batch_indices_positions, get_batch_indices_positions)
