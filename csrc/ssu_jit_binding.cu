// SPDX-License-Identifier: Apache-2.0
// Exports of an ssu module.
#include "ssu.cu"

FLASHINFER_EXPORT(selective_state_update, selective_state_update)
FLASHINFER_EXPORT(ssu_decode, ssu_decode)
