// SPDX-License-Identifier: Apache-2.0
// Exports of a gemm_sm90 module.
#include "gemm_sm90.cu"

FLASHINFER_EXPORT(gemm_sm90, gemm_sm90)
FLASHINFER_EXPORT(gemm_sm90_experts, gemm_sm90_experts)
FLASHINFER_EXPORT(gemm_sm90_ordinary, gemm_sm90_ordinary)
FLASHINFER_EXPORT(gemm_sm90_blockscale, gemm_sm90_blockscale)
FLASHINFER_EXPORT(gemm_sm90_choose, gemm_sm90_choose)
