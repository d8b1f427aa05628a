// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_mla module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_mla.cu"

FLASHINFER_EXPORT_PLAN(plan, batch_mla_plan)
FLASHINFER_EXPORT_PLAN(plan_ext, batch_mla_plan_ext)
FLASHINFER_EXPORT(published_plan, batch_mla_published_plan)
FLASHINFER_EXPORT(run, batch_mla_run)
FLASHINFER_EXPORT(run_scaled, batch_mla_run_scaled)
FLASHINFER_EXPORT(record_run, batch_mla_record_run)
FLASHINFER_EXPORT(rerun, batch_mla_rerun)
