// SPDX-License-Identifier: Apache-2.0
// Exports of a gemm_sm90 module.
#include "tvm_ffi_utils.h"

bool gemm_sm90(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale, Optional<TensorView> b_scale,
               Optional<TensorView> bias, Optional<TensorView> groups, Optional<TensorView> weight_indices,
               int64_t grouping, int64_t scale_rows, int64_t expected_m, bool enable_pdl, bool weights_first);
/// Multiply the rows of experts for fused_moe.cu, on the current device. `problem`: a flashinfer::gemm::GemmProblem;
/// `weights_first`: the kernel before this one wrote neither weights nor `groups`.
void gemm_sm90_experts(void* problem, int64_t device_id, bool enable_pdl, bool weights_first);
bool gemm_sm90_with_tile(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale,
                         Optional<TensorView> b_scale, Optional<TensorView> bias, Optional<TensorView> groups,
                         Optional<TensorView> weight_indices, int64_t grouping, int64_t scale_rows, int64_t tile,
                         int64_t cluster, bool share_b, int64_t raster, int64_t blocks, bool enable_pdl,
                         bool weights_first);
bool gemm_sm90_quantizing(TensorView out, TensorView input, TensorView weight, TensorView weight_scale,
                          int64_t scale_rows, TensorView workspace, bool enable_pdl);
/// Ordinary calls of public functions, with the tensors as callers pass them. Each returns false, having done nothing,
/// for operands that the checks in Python must look at; errors have no meaning to callers but that.
bool gemm_sm90_dense(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale,
                     Optional<TensorView> b_scale, Optional<TensorView> bias, bool enable_pdl);
bool gemm_sm90_grouped(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale,
                       Optional<TensorView> b_scale, TensorView groups, int64_t grouping, int64_t expected_m,
                       bool enable_pdl);
bool gemm_sm90_blockscale(TensorView out, TensorView input, TensorView weight, Optional<TensorView> input_scale,
                          TensorView weight_scale, bool enable_pdl);
int64_t gemm_sm90_choose(int64_t rows, int64_t n, int64_t k, int64_t batch, int64_t grouping, bool needs_swapped,
                         int64_t sms);

FLASHINFER_EXPORT(gemm_sm90, gemm_sm90)
FLASHINFER_EXPORT(gemm_sm90_experts, gemm_sm90_experts)
FLASHINFER_EXPORT(gemm_sm90_with_tile, gemm_sm90_with_tile)
FLASHINFER_EXPORT(gemm_sm90_quantizing, gemm_sm90_quantizing)
FLASHINFER_EXPORT(gemm_sm90_dense, gemm_sm90_dense)
FLASHINFER_EXPORT(gemm_sm90_grouped, gemm_sm90_grouped)
FLASHINFER_EXPORT(gemm_sm90_blockscale, gemm_sm90_blockscale)
FLASHINFER_EXPORT(gemm_sm90_choose, gemm_sm90_choose)
