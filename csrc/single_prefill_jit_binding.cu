// SPDX-License-Identifier: Apache-2.0
// Exports of a single_prefill module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "single_prefill.cu"

FLASHINFER_EXPORT_RUN(run, single_prefill_run)
