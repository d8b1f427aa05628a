// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_decode module.
#include "attention_arguments.h"

using flashinfer::attention::Numbers;

Numbers batch_decode_plan(TensorView float_ws, TensorView int_ws, TensorView pinned, TensorView indptr,
                          int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                          bool enable_cuda_graph, int64_t window_left, double logits_soft_cap, int64_t head_dim_qk,
                          int64_t head_dim_vo, TensorView empty_q, TensorView empty_kv);
Numbers batch_decode_plan_with_lens(TensorView float_ws, TensorView int_ws, TensorView pinned, TensorView kv_indptr,
                                    TensorView kv_lens, int64_t q_len, int64_t num_qo_heads, int64_t num_kv_heads,
                                    int64_t page_size, bool enable_cuda_graph, int64_t window_left,
                                    int64_t fixed_split_size, bool disable_split_kv);
Numbers batch_decode_workspace_size(TensorView indptr, int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                                    int64_t page_size, bool enable_cuda_graph, int64_t window_left,
                                    double logits_soft_cap, int64_t head_dim_qk, int64_t head_dim_vo,
                                    TensorView empty_q, TensorView empty_kv);
Numbers batch_decode_workspace_size_with_lens(TensorView kv_indptr, TensorView kv_lens, int64_t q_len,
                                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                                              bool enable_cuda_graph, int64_t window_left, int64_t fixed_split_size,
                                              bool disable_split_kv);
Numbers batch_decode_plan_uniform(TensorView float_ws, TensorView int_ws, TensorView pinned, int64_t batch_size,
                                  int64_t q_len, int64_t pages_per_request, int64_t max_kv_len, int64_t num_qo_heads,
                                  int64_t num_kv_heads, int64_t page_size, bool causal);
Numbers batch_decode_uniform_workspace_size(int64_t batch_size, int64_t q_len, int64_t pages_per_request,
                                            int64_t max_kv_len, int64_t num_qo_heads, int64_t num_kv_heads,
                                            int64_t page_size, bool causal);
void batch_decode_run(flashinfer::attention::Arguments& args);

FLASHINFER_EXPORT_PLAN(plan, batch_decode_plan)
FLASHINFER_EXPORT_PLAN(plan_with_lens, batch_decode_plan_with_lens)
/// Takes what either plan takes after the buffers.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_workspace_size(void*, const TVMFFIAny* args, int32_t count,
                                                           TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  constexpr int PLAN_ARGUMENTS = 12;
  using flashinfer::attention::CallForNumbers;
  *reinterpret_cast<tvm::ffi::Any*>(result) =
      count == PLAN_ARGUMENTS ? CallForNumbers("workspace_size", batch_decode_workspace_size, args, count)
                              : CallForNumbers("workspace_size", batch_decode_workspace_size_with_lens, args, count);
  TVM_FFI_SAFE_CALL_END();
}
FLASHINFER_EXPORT_PLAN(plan_uniform, batch_decode_plan_uniform)
FLASHINFER_EXPORT_PLAN(uniform_workspace_size, batch_decode_uniform_workspace_size)
FLASHINFER_EXPORT_RUN(run, batch_decode_run)
