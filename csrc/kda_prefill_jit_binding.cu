// SPDX-License-Identifier: Apache-2.0
// Exports of the module of chunked Kimi delta attention.
#include "kda_prefill.cu"

FLASHINFER_EXPORT(kda_prefill, kda_prefill)
FLASHINFER_EXPORT(kda_prefill_workspace, kda_prefill_workspace)
