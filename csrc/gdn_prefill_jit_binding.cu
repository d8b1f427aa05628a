// SPDX-License-Identifier: Apache-2.0
// Exports of the gdn_prefill modules.
#include "gdn_prefill.cu"

FLASHINFER_EXPORT(gdn_prefill, gdn_prefill)
FLASHINFER_EXPORT(gdn_prefill_workspace, gdn_prefill_workspace)
