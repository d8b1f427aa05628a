// SPDX-License-Identifier: Apache-2.0
// Launcher of moe_sort: argument checks, stream.
#include <algorithm>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/moe/sort.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/moe/cpu/sort.h>
#elif defined(__CUDACC__)
#include <flashinfer/moe/sort.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

constexpr const char* OP = "moe_sort";

void CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must be from " << low << " to " << high << ", got "
                                    << value;
  }
}

int32_t* Numbers(const char* name, const TensorView& t, const TensorView& experts, int64_t least) {
  Expect(OP, name, t).same_device(experts, "experts").dtype({dl_int32}).contiguous();
  if (t.numel() < least || t.numel() > INT32_MAX) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must have at least " << least << " elements, got "
                                    << t.numel();
  }
  return t.data_ptr<int32_t>();
}

int32_t* Numbers(const char* name, const Optional<TensorView>& t, const TensorView& experts, int64_t least) {
  return t.has_value() ? Numbers(name, t.value(), experts, least) : nullptr;
}

}  // namespace

int64_t moe_sort_workspace_ints(int64_t pairs, int64_t num_experts) { return MoeSortWorkspaceInts(pairs, num_experts); }

/// Optional tables are written as far as they are given. `row_to_pair` and the tile tables may be longer than needed.
void moe_sort(TensorView expert_offsets, TensorView pair_to_row, Optional<TensorView> row_to_pair,
              Optional<TensorView> expert_counts, Optional<TensorView> tile_expert, Optional<TensorView> tile_begin,
              Optional<TensorView> tile_end, Optional<TensorView> num_tiles, Optional<TensorView> num_rows,
              Optional<TensorView> workspace, TensorView experts, int64_t first_expert, int64_t num_experts,
              int64_t align, int64_t tile, bool enable_pdl) {
  Expect(OP, "experts", experts).on_device().dtype({dl_int32}).rank(2).contiguous();
  const int64_t pairs = experts.numel();
  CheckRange("num_experts", num_experts, 1, MOE_SORT_MAX_EXPERTS);
  CheckRange("first_expert", first_expert, 0, INT32_MAX - num_experts);
  CheckRange("align", align, 1, 1 << 16);
  CheckRange("tile", tile, tile_expert.has_value() || tile_begin.has_value() || tile_end.has_value(), 1 << 16);
  const int64_t max_rows = MoeSortMaxRows(pairs, num_experts, align);
  const int64_t max_tiles = tile > 0 ? MoeSortMaxTiles(pairs, num_experts, tile) : 0;
  CheckRange("rows of all experts", max_rows, 0, INT32_MAX - (1 << 16));

  MoeSortParams p{};
  p.experts = experts.data_ptr<int32_t>();
  p.pairs = int32_t(pairs);
  p.first_expert = int32_t(first_expert);
  p.num_experts = int32_t(num_experts);
  p.align = int32_t(align);
  p.tile = int32_t(tile);
  p.expert_offsets = Numbers("expert_offsets", expert_offsets, experts, num_experts + 1);
  p.pair_to_row = Numbers("pair_to_row", pair_to_row, experts, pairs);
  p.row_to_pair = Numbers("row_to_pair", row_to_pair, experts, max_rows);
  p.max_rows = row_to_pair.has_value() ? int32_t(row_to_pair.value().numel()) : 0;
  p.expert_counts = Numbers("expert_counts", expert_counts, experts, num_experts);
  p.tile_expert = Numbers("tile_expert", tile_expert, experts, max_tiles);
  p.tile_begin = Numbers("tile_begin", tile_begin, experts, max_tiles);
  p.tile_end = Numbers("tile_end", tile_end, experts, max_tiles);
  p.max_tiles = INT32_MAX;  // the shortest table
  for (const auto& table : {tile_expert, tile_begin, tile_end}) {
    if (table.has_value()) p.max_tiles = std::min(p.max_tiles, int32_t(table.value().numel()));
  }
  if (p.max_tiles == INT32_MAX) p.max_tiles = 0;
  p.num_tiles = Numbers("num_tiles", num_tiles, experts, 1);
  p.num_rows = Numbers("num_rows", num_rows, experts, 1);
#ifndef FLASHINFER_CPU
  const int64_t ints = MoeSortWorkspaceInts(pairs, num_experts);
  p.workspace = Numbers("workspace", workspace, experts, ints);
  if (ints > 0 && p.workspace == nullptr) {
    FLASHINFER_THROW(ArgumentError) << OP << ": workspace must have at least " << ints << " elements, got None";
  }
#endif
  p.enable_pdl = UsePdl(enable_pdl, experts.device());
  DeviceGuard guard(experts.device());
  CheckStatus(OP, MoeSort(p, get_stream(experts.device())));
}
