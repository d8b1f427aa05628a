// SPDX-License-Identifier: Apache-2.0
// Exports of a gemm_sm90 module.
#include "gemm_sm90.cu"

FLASHINFER_EXPORT(gemm_sm90, gemm_sm90)
FLASHINFER_EXPORT(gemm_sm90_experts, gemm_sm90_experts)
FLASHINFER_EXPORT(gemm_sm90_experts_with_tiles, gemm_sm90_experts_with_tiles)
FLASHINFER_EXPORT(gemm_sm90_with_tile, gemm_sm90_with_tile)
FLASHINFER_EXPORT(gemm_sm90_quantizing, gemm_sm90_quantizing)
FLASHINFER_EXPORT(gemm_sm90_dense, gemm_sm90_dense)
FLASHINFER_EXPORT(gemm_sm90_grouped, gemm_sm90_grouped)
FLASHINFER_EXPORT(gemm_sm90_blockscale, gemm_sm90_blockscale)
FLASHINFER_EXPORT(gemm_sm90_choose, gemm_sm90_choose)
