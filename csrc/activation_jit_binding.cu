// SPDX-License-Identifier: Apache-2.0
// Exports of the activation module.
#include "tvm_ffi_utils.h"

void silu_and_mul(TensorView out, TensorView input, bool enable_pdl);
void gelu_and_mul(TensorView out, TensorView input, bool enable_pdl);
void gelu_tanh_and_mul(TensorView out, TensorView input, bool enable_pdl);
void swiglu(TensorView out, TensorView x, TensorView gate);

FLASHINFER_EXPORT(silu_and_mul, silu_and_mul)
FLASHINFER_EXPORT(gelu_and_mul, gelu_and_mul)
FLASHINFER_EXPORT(gelu_tanh_and_mul, gelu_tanh_and_mul)
FLASHINFER_EXPORT(swiglu, swiglu)
