// SPDX-License-Identifier: Apache-2.0
// Exports of the shift module.
#include "tvm_ffi_utils.h"

void shift(TensorView out, TensorView input, double amount);

FLASHINFER_EXPORT(shift, shift)
