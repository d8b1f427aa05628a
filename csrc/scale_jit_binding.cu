// SPDX-License-Identifier: Apache-2.0
// Exports of a scale module.
#include "tvm_ffi_utils.h"

void scale(TensorView input, TensorView output, double factor);

FLASHINFER_EXPORT(run, scale)
