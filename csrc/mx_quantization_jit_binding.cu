// SPDX-License-Identifier: Apache-2.0
// Exports of the mx_quantization module.
#include "tvm_ffi_utils.h"

void mxfp8_quantize(TensorView out, TensorView scales, TensorView input, int64_t layout, bool enable_pdl);
void block_scale_interleave(TensorView out, TensorView unswizzled_sf);

FLASHINFER_EXPORT(mxfp8_quantize, mxfp8_quantize)
FLASHINFER_EXPORT(block_scale_interleave, block_scale_interleave)

#ifdef FLASHINFER_CPU
void dequantize(TensorView out, TensorView input, TensorView scales, Optional<TensorView> global_scale,
                int64_t block_size, bool is_e2m1, bool is_scale_e4m3, int64_t layout, tvm::ffi::String op_name,
                tvm::ffi::String input_name, tvm::ffi::String scales_name);

FLASHINFER_EXPORT(dequantize, dequantize)
#endif
