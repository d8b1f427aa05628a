// SPDX-License-Identifier: Apache-2.0
// Exports of the module of the residual RMSNorm with e4m3 blocks.
#include "norm_block_quant.cu"

FLASHINFER_EXPORT(fused_add_rmsnorm_fp8_block_quant, fused_add_rmsnorm_fp8_block_quant)
