// SPDX-License-Identifier: Apache-2.0
// Exports of the bgmv_moe module.
#include "bgmv_moe.cu"

FLASHINFER_EXPORT(bgmv_moe_shrink, bgmv_moe_shrink)
FLASHINFER_EXPORT(bgmv_moe_expand, bgmv_moe_expand)
FLASHINFER_EXPORT(bgmv_moe_apply, bgmv_moe_apply)
