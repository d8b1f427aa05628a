// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_routing module.
#include "moe_routing.cu"

FLASHINFER_EXPORT(moe_route, moe_route)
FLASHINFER_EXPORT(hash_topk, hash_topk)
