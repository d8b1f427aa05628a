// SPDX-License-Identifier: Apache-2.0
// Exports of the nvfp4_kv module.
#include "nvfp4_kv.cu"

FLASHINFER_EXPORT(nvfp4_kv_dequantize, nvfp4_kv_dequantize)
FLASHINFER_EXPORT(nvfp4_kv_dequantize_paged, nvfp4_kv_dequantize_paged)
