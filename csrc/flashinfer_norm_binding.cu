// SPDX-License-Identifier: Apache-2.0
// The name under which published callers list the norm binding to compile the family by hand, each file on its own: it
// does not include norm.cu, as norm_jit_binding.cu does.
#include "tvm_ffi_utils.h"

void rmsnorm(TensorView out, TensorView input, TensorView weight, double eps, double weight_bias, bool enable_pdl);
void fused_add_rmsnorm(TensorView input, TensorView residual, TensorView weight, double eps, double weight_bias,
                       bool enable_pdl);
void rmsnorm_quant(TensorView out, TensorView input, TensorView weight, TensorView scale, double eps, bool enable_pdl);
void fused_add_rmsnorm_quant(TensorView out, TensorView input, TensorView residual, TensorView weight, TensorView scale,
                             double eps, bool enable_pdl);
void rmsnorm_silu(TensorView out, TensorView input, TensorView weight, double eps);
void layernorm(TensorView out, TensorView input, TensorView gamma, TensorView beta, double eps);
void layernorm_quant(TensorView out, TensorView input, TensorView gamma, TensorView beta, TensorView scale, double eps);

FLASHINFER_EXPORT(rmsnorm, rmsnorm)
FLASHINFER_EXPORT(fused_add_rmsnorm, fused_add_rmsnorm)
FLASHINFER_EXPORT(rmsnorm_quant, rmsnorm_quant)
FLASHINFER_EXPORT(fused_add_rmsnorm_quant, fused_add_rmsnorm_quant)
FLASHINFER_EXPORT(rmsnorm_silu, rmsnorm_silu)
FLASHINFER_EXPORT(layernorm, layernorm)
FLASHINFER_EXPORT(layernorm_quant, layernorm_quant)
