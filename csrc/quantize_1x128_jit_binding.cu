// SPDX-License-Identifier: Apache-2.0
// Exports of the quantize_1x128 module.
#include "tvm_ffi_utils.h"

void quantize_1x128(TensorView codes, TensorView scales, TensorView input, bool enable_pdl);

FLASHINFER_EXPORT(quantize_1x128, quantize_1x128)
