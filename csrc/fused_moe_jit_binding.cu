// SPDX-License-Identifier: Apache-2.0
// Exports of the fused_moe module.
#include "fused_moe.cu"

FLASHINFER_EXPORT(fused_moe, fused_moe)
FLASHINFER_EXPORT(fused_moe_workspace_size, fused_moe_workspace_size)
#if !defined(FLASHINFER_CPU)
FLASHINFER_EXPORT(mono_moe, mono_moe)
#endif
