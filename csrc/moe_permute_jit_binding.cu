// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_permute module.
#include "tvm_ffi_utils.h"

void moe_permute(TensorView output, TensorView input, TensorView row_to_pair, int64_t top_k, bool enable_pdl);
void moe_permute_fp8(TensorView output, TensorView input, TensorView row_to_pair, Optional<TensorView> factor,
                     int64_t top_k, bool enable_pdl);
void moe_permute_fp8_block(TensorView output, TensorView scales, TensorView input, TensorView row_to_pair,
                           int64_t top_k, bool enable_pdl);
void moe_finalize(TensorView output, TensorView rows, TensorView pair_to_row, Optional<TensorView> scales,
                  bool enable_pdl);

FLASHINFER_EXPORT(moe_permute, moe_permute)
FLASHINFER_EXPORT(moe_permute_fp8, moe_permute_fp8)
FLASHINFER_EXPORT(moe_permute_fp8_block, moe_permute_fp8_block)
FLASHINFER_EXPORT(moe_finalize, moe_finalize)
