// SPDX-License-Identifier: Apache-2.0
// Exports of a gemm_w4_sm90 module.
#include "tvm_ffi_utils.h"

/// Multiply the rows of experts with four-bit weights for fused_moe.cu, on the current device. `problem`: a
/// flashinfer::gemm::W4Problem; `weights_first`: the kernel before this one wrote neither weights nor `groups`.
void gemm_w4_sm90_experts(void* problem, int64_t device_id, bool enable_pdl, bool weights_first);

FLASHINFER_EXPORT(gemm_w4_sm90_experts, gemm_w4_sm90_experts)
