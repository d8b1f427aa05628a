// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_permute module.
#include "moe_permute.cu"

FLASHINFER_EXPORT(moe_permute, moe_permute)
FLASHINFER_EXPORT(moe_permute_fp8, moe_permute_fp8)
FLASHINFER_EXPORT(moe_permute_fp8_block, moe_permute_fp8_block)
FLASHINFER_EXPORT(moe_finalize, moe_finalize)
