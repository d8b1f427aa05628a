// SPDX-License-Identifier: Apache-2.0
// Exports of the page_nvfp4 module.
#include "tvm_ffi_utils.h"

void nvfp4_quantize_append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView batch_indices,
                                          TensorView positions, TensorView cache, Optional<TensorView> value_cache,
                                          TensorView sf, Optional<TensorView> value_sf, TensorView kv_indices,
                                          TensorView kv_indptr, double k_scale, double v_scale, bool is_hnd,
                                          bool validate);
void nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(TensorView append_key, TensorView append_value,
                                                            TensorView slot_mapping, TensorView cache,
                                                            Optional<TensorView> value_cache, TensorView sf,
                                                            Optional<TensorView> value_sf, double k_scale,
                                                            double v_scale, Optional<TensorView> k_scale_tensor,
                                                            Optional<TensorView> v_scale_tensor, bool is_hnd);

FLASHINFER_EXPORT(nvfp4_quantize_append_paged_kv_cache, nvfp4_quantize_append_paged_kv_cache)
FLASHINFER_EXPORT(nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
                  nvfp4_quantize_append_paged_kv_cache_with_slot_mapping)
