// SPDX-License-Identifier: Apache-2.0
// Exports of the fused_moe module.
#include "tvm_ffi_utils.h"

using tvm::ffi::Function;

void fused_moe(TensorView output, TensorView input, TensorView experts, Optional<TensorView> token_scales,
               TensorView fc1, TensorView fc2, Optional<TensorView> bias1, Optional<TensorView> bias2,
               Optional<TensorView> scale1, Optional<TensorView> scale2, Optional<TensorView> factor1,
               Optional<TensorView> factor2, Optional<TensorView> quant1, Optional<TensorView> quant2,
               Optional<TensorView> alpha, Optional<TensorView> beta, Optional<TensorView> limit,
               Optional<TensorView> situ_beta, Optional<TensorView> situ_linear_beta, Optional<TensorView> workspace,
               Optional<Function> product, int64_t format, int64_t activation, int64_t first_expert, bool adds_bias2,
               bool use_sm90, bool enable_pdl);
int64_t fused_moe_workspace_size(int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate, int64_t experts,
                                 int64_t format, int64_t activation, bool use_sm90);

FLASHINFER_EXPORT(fused_moe, fused_moe)
FLASHINFER_EXPORT(fused_moe_workspace_size, fused_moe_workspace_size)
