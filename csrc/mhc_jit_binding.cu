// SPDX-License-Identifier: Apache-2.0
// Exports of the mhc module.
#include "mhc.cu"

FLASHINFER_EXPORT(mhc_post, mhc_post)
FLASHINFER_EXPORT(mhc_pre, mhc_pre)
