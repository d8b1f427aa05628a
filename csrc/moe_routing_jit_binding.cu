// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_routing module.
#include "tvm_ffi_utils.h"

void moe_route(TensorView weights, TensorView experts, Optional<TensorView> replay, TensorView logits,
               Optional<TensorView> bias, int64_t groups, int64_t top_groups, int64_t score, int64_t weight,
               double factor, bool enable_pdl, bool is_deepseek, int64_t block_tokens);
void hash_topk(TensorView weights, TensorView experts, TensorView router_logits, TensorView input_ids,
               TensorView tid2eid, double factor, bool enable_pdl);

FLASHINFER_EXPORT(moe_route, moe_route)
FLASHINFER_EXPORT(hash_topk, hash_topk)
