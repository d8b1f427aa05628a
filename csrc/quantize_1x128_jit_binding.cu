// SPDX-License-Identifier: Apache-2.0
// Exports of the quantize_1x128 module.
#include "quantize_1x128.cu"

FLASHINFER_EXPORT(quantize_1x128, quantize_1x128)
