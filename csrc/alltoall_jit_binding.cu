// SPDX-License-Identifier: Apache-2.0
// Exports of the alltoall module.
#include "alltoall.cu"

FLASHINFER_EXPORT(moe_a2a_get_aux_data_size, moe_a2a_get_aux_data_size)
FLASHINFER_EXPORT(moe_a2a_offsets, moe_a2a_offsets)
FLASHINFER_EXPORT(moe_a2a_dispatch, moe_a2a_dispatch)
FLASHINFER_EXPORT(moe_a2a_sanitize_expert_ids, moe_a2a_sanitize_expert_ids)
FLASHINFER_EXPORT(moe_a2a_combine, moe_a2a_combine)
FLASHINFER_EXPORT(decode_cp_exchange, decode_cp_exchange)
