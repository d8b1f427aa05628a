// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_comm module.
#include "moe_comm.cu"

FLASHINFER_EXPORT(moe_comm, moe_comm)
FLASHINFER_EXPORT(moe_comm_slot_bytes, moe_comm_slot_bytes)
FLASHINFER_EXPORT(moe_comm_workspace_bytes, moe_comm_workspace_bytes)
