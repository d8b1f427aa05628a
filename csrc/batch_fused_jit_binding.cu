// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_fused module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_fused.cu"

FLASHINFER_EXPORT_PLAN(plan, batch_fused_plan)
FLASHINFER_EXPORT_RUN(run, batch_fused_run)
FLASHINFER_EXPORT_RUN(record_run, batch_fused_record_run)
FLASHINFER_EXPORT_RUN(rerun, batch_fused_rerun)
