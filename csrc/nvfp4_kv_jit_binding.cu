// SPDX-License-Identifier: Apache-2.0
// Exports of the nvfp4_kv module.
#include "tvm_ffi_utils.h"

void nvfp4_kv_dequantize(TensorView out, TensorView fp4_data, TensorView block_scales, TensorView global_scale);
void nvfp4_kv_dequantize_paged(TensorView k_cache, TensorView v_cache, TensorView k_sf, TensorView v_sf,
                               TensorView block_tables, TensorView seq_lens, TensorView k_scale, TensorView v_scale,
                               TensorView output_k, TensorView output_v, bool is_hnd);

FLASHINFER_EXPORT(nvfp4_kv_dequantize, nvfp4_kv_dequantize)
FLASHINFER_EXPORT(nvfp4_kv_dequantize_paged, nvfp4_kv_dequantize_paged)
