// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_sort module.
#include "moe_sort.cu"

FLASHINFER_EXPORT(moe_sort_workspace_ints, moe_sort_workspace_ints)
FLASHINFER_EXPORT(moe_sort, moe_sort)
