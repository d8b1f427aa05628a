// SPDX-License-Identifier: Apache-2.0
// Exports of a gemm_w4_sm90 module.
#include "gemm_w4_sm90.cu"

FLASHINFER_EXPORT(gemm_w4_sm90_experts, gemm_w4_sm90_experts)
