// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_prefill module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_prefill.cu"

FLASHINFER_EXPORT_PLAN(plan, batch_prefill_plan)
FLASHINFER_EXPORT_PLAN(workspace_size, batch_prefill_workspace_size)
FLASHINFER_EXPORT_PLAN(plan_uniform, batch_prefill_plan_uniform)
FLASHINFER_EXPORT_PLAN(uniform_workspace_size, batch_prefill_uniform_workspace_size)
FLASHINFER_EXPORT_RUN(paged_run, batch_prefill_paged_run)
FLASHINFER_EXPORT_RUN(ragged_run, batch_prefill_ragged_run)
FLASHINFER_EXPORT_RUN(record_paged_run, batch_prefill_record_paged_run)
FLASHINFER_EXPORT_RUN(record_ragged_run, batch_prefill_record_ragged_run)
FLASHINFER_EXPORT_RUN(rerun, batch_prefill_rerun)
FLASHINFER_EXPORT_RUN(replan, batch_prefill_replan)
FLASHINFER_EXPORT_RUN(paged_pair_run, batch_prefill_paged_pair_run)
FLASHINFER_EXPORT_RUN(single_pair_run, batch_prefill_single_pair_run)
