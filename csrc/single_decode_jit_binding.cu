// SPDX-License-Identifier: Apache-2.0
// Exports of a single_decode module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "single_decode.cu"

FLASHINFER_EXPORT_RUN(run, single_decode_run)
