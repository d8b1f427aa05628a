// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_prefill module.
#include "attention_arguments.h"

using flashinfer::attention::Arguments;
using flashinfer::attention::Numbers;

Numbers batch_prefill_plan(TensorView float_ws, TensorView int_ws, TensorView pinned, TensorView qo_indptr,
                           TensorView kv_indptr, TensorView kv_lens, int64_t total_num_rows, int64_t batch_size,
                           int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph,
                           int64_t head_dim_qk, int64_t head_dim_vo, bool causal, int64_t window_left,
                           int64_t fixed_split_size, bool disable_split_kv, int64_t num_colocated_ctas,
                           int64_t uniform_q_len);
Numbers batch_prefill_workspace_size(TensorView qo_indptr, TensorView kv_indptr, TensorView kv_lens,
                                     int64_t total_num_rows, int64_t batch_size, int64_t num_qo_heads,
                                     int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph,
                                     int64_t head_dim_qk, int64_t head_dim_vo, bool causal, int64_t window_left,
                                     int64_t fixed_split_size, bool disable_split_kv, int64_t num_colocated_ctas,
                                     int64_t uniform_q_len);
Numbers batch_prefill_plan_uniform(TensorView float_ws, TensorView int_ws, TensorView pinned, int64_t batch_size,
                                   int64_t q_len, int64_t pages_per_request, int64_t max_kv_len, int64_t num_qo_heads,
                                   int64_t num_kv_heads, int64_t page_size, bool causal);
Numbers batch_prefill_uniform_workspace_size(int64_t batch_size, int64_t q_len, int64_t pages_per_request,
                                             int64_t max_kv_len, int64_t num_qo_heads, int64_t num_kv_heads,
                                             int64_t page_size, bool causal);
void batch_prefill_paged_run(Arguments& args);
void batch_prefill_ragged_run(Arguments& args);

FLASHINFER_EXPORT_PLAN(plan, batch_prefill_plan)
FLASHINFER_EXPORT_PLAN(workspace_size, batch_prefill_workspace_size)
FLASHINFER_EXPORT_PLAN(plan_uniform, batch_prefill_plan_uniform)
FLASHINFER_EXPORT_PLAN(uniform_workspace_size, batch_prefill_uniform_workspace_size)
FLASHINFER_EXPORT_RUN(paged_run, batch_prefill_paged_run)
FLASHINFER_EXPORT_RUN(ragged_run, batch_prefill_ragged_run)
