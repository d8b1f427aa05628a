// SPDX-License-Identifier: Apache-2.0
// Exports of the bgmv_moe module.
#include "tvm_ffi_utils.h"

void bgmv_moe_shrink(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, Optional<TensorView> x_rows, int64_t lora_stride);
void bgmv_moe_expand(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, Optional<TensorView> weights, TensorView slice_starts,
                     Optional<TensorView> order, Optional<TensorView> offsets, int64_t top_k, int64_t columns,
                     int64_t lora_stride, bool is_bf16, bool finalize, double scale);

FLASHINFER_EXPORT(bgmv_moe_shrink, bgmv_moe_shrink)
FLASHINFER_EXPORT(bgmv_moe_expand, bgmv_moe_expand)
