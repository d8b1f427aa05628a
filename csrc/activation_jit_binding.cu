// SPDX-License-Identifier: Apache-2.0
// Exports of the activation module.
#include "tvm_ffi_utils.h"

void silu_and_mul(TensorView out, TensorView input, bool enable_pdl);
void gelu_and_mul(TensorView out, TensorView input, bool enable_pdl);
void gelu_tanh_and_mul(TensorView out, TensorView input, bool enable_pdl);
void swiglu(TensorView out, TensorView x, TensorView gate);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu_and_mul, gelu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gelu_tanh_and_mul, gelu_tanh_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu, swiglu);
