// SPDX-License-Identifier: Apache-2.0
// Exports of the norm module.
#include "norm.cu"

FLASHINFER_EXPORT(rmsnorm, rmsnorm)
FLASHINFER_EXPORT(fused_add_rmsnorm, fused_add_rmsnorm)
FLASHINFER_EXPORT(rmsnorm_quant, rmsnorm_quant)
FLASHINFER_EXPORT(fused_add_rmsnorm_quant, fused_add_rmsnorm_quant)
FLASHINFER_EXPORT(rmsnorm_silu, rmsnorm_silu)
FLASHINFER_EXPORT(layernorm, layernorm)
FLASHINFER_EXPORT(layernorm_quant, layernorm_quant)
