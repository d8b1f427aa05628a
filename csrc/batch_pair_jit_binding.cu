// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_pair module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_pair.cu"

FLASHINFER_EXPORT_PLAN(plan, batch_pair_plan)
FLASHINFER_EXPORT_RUN(run, batch_pair_run)
FLASHINFER_EXPORT_RUN(record_run, batch_pair_record_run)
FLASHINFER_EXPORT_RUN(rerun, batch_pair_rerun)
