// SPDX-License-Identifier: Apache-2.0
// Exports of the moe_sort module.
#include "tvm_ffi_utils.h"

int64_t moe_sort_workspace_ints(int64_t pairs, int64_t num_experts);
void moe_sort(TensorView expert_offsets, TensorView pair_to_row, Optional<TensorView> row_to_pair,
              Optional<TensorView> expert_counts, Optional<TensorView> tile_expert, Optional<TensorView> tile_begin,
              Optional<TensorView> tile_end, Optional<TensorView> num_tiles, Optional<TensorView> num_rows,
              Optional<TensorView> workspace, TensorView experts, int64_t first_expert, int64_t num_experts,
              int64_t align, int64_t tile, bool enable_pdl);

FLASHINFER_EXPORT(moe_sort_workspace_ints, moe_sort_workspace_ints)
FLASHINFER_EXPORT(moe_sort, moe_sort)
