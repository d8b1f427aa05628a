// SPDX-License-Identifier: Apache-2.0
// Exports of the page module.
#include "tvm_ffi_utils.h"

bool append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView cache,
                           Optional<TensorView> value_cache, bool is_hnd, bool validate, TensorView batch_indices,
                           TensorView positions, TensorView kv_indices, TensorView kv_indptr);
bool append_paged_mla_kv_cache(TensorView append_ckv, TensorView append_kpe, TensorView ckv_cache, TensorView kpe_cache,
                               bool validate, TensorView batch_indices, TensorView positions, TensorView kv_indices,
                               TensorView kv_indptr);
void get_batch_indices_positions(TensorView append_indptr, TensorView seq_lens, TensorView batch_indices,
                                 TensorView positions);

FLASHINFER_EXPORT(append_paged_kv_cache, append_paged_kv_cache)
FLASHINFER_EXPORT(append_paged_mla_kv_cache, append_paged_mla_kv_cache)
FLASHINFER_EXPORT(get_batch_indices_positions, get_batch_indices_positions)
