// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_mla module.
#include "attention_arguments.h"

using flashinfer::attention::Numbers;

Numbers batch_mla_plan(TensorView float_ws, TensorView int_ws, TensorView pinned, TensorView qo_indptr,
                       TensorView kv_indptr, TensorView kv_lens, int64_t num_heads, int64_t head_dim_ckv, bool causal);
Numbers batch_mla_plan_ext(TensorView float_ws, TensorView int_ws, TensorView pinned, TensorView qo_indptr,
                           TensorView kv_indptr, TensorView kv_lens, int64_t num_heads, int64_t head_dim_ckv,
                           bool causal, int64_t page_size, bool enable_cuda_graph, int64_t max_rows);
void batch_mla_run(TensorView float_ws, TensorView int_ws, Numbers plan_info, TensorView q_nope,
                   Optional<TensorView> q_pe, TensorView ckv_cache, Optional<TensorView> kpe_cache,
                   TensorView kv_indices, TensorView o, Optional<TensorView> lse, int64_t mask_mode, int64_t num_heads,
                   int64_t page_size, double sm_scale, bool return_lse_base_on_e, bool enable_pdl);

FLASHINFER_EXPORT_PLAN(plan, batch_mla_plan)
FLASHINFER_EXPORT_PLAN(plan_ext, batch_mla_plan_ext)
FLASHINFER_EXPORT(run, batch_mla_run)
