// SPDX-License-Identifier: Apache-2.0
// Exports of the mx_quantization module.
#include "mx_quantization.cu"

FLASHINFER_EXPORT(mxfp8_quantize, mxfp8_quantize)
FLASHINFER_EXPORT(block_scale_interleave, block_scale_interleave)

#ifdef FLASHINFER_CPU
FLASHINFER_EXPORT(dequantize, dequantize)
#endif
