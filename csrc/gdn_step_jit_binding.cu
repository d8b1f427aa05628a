// SPDX-License-Identifier: Apache-2.0
// Exports of the module of the gated delta rule token by token.
#include "gdn_step.cu"

FLASHINFER_EXPORT(gdn_decode, gdn_decode)
FLASHINFER_EXPORT(gdn_verify, gdn_verify)
FLASHINFER_EXPORT(gdn_replay, gdn_replay)
FLASHINFER_EXPORT(gdn_ring, gdn_ring)
FLASHINFER_EXPORT(gdn_decode_k_major, gdn_decode_k_major)
