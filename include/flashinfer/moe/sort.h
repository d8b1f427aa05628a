// SPDX-License-Identifier: Apache-2.0
// Order of (token, slot) pairs by expert, the first step of a mixture-of-experts layer: parameters and entry, shared by
// both backends. A stable counting sort: rows of an expert keep the order of tokens, so results are the same bits at
// each call. Defined in sort.cuh (CUDA) and cpu/sort.h (CPU).
//   test  pytest tests/fused_moe/test_moe_sort.py      bench  python benchmarks/bench_moe_sort.py
#pragma once
#include <cstdint>

#include "../backend.h"

namespace flashinfer {

struct MoeSortParams {
  const int32_t* experts;  ///< (pairs,) chosen experts by token, then slot; numbers outside the local range are skipped
  int32_t pairs;           ///< tokens * slots per token
  int32_t first_expert;    ///< the local range is [first_expert, first_expert + num_experts)
  int32_t num_experts;     ///< 1 to MOE_SORT_MAX_EXPERTS
  int32_t align = 1;       ///< rows of an expert begin at a multiple of this; 1 leaves no gaps
  int32_t tile = 0;        ///< rows of a tile; 0 if no table of tiles is asked for

  // Outputs. Rows are positions in expert order.
  int32_t* expert_offsets;           ///< (num_experts + 1,) first row of each expert; the last is the end of all rows
  int32_t* expert_counts = nullptr;  ///< (num_experts,) rows without gaps; or null
  int32_t* pair_to_row;              ///< (pairs,) -1 for a pair that is skipped
  int32_t* row_to_pair = nullptr;    ///< (max_rows,) -1 for gaps and behind the last row; or null
  int32_t max_rows = 0;
  int32_t* tile_expert = nullptr;  ///< (max_tiles,) expert of a tile, from 0; -1 behind the last tile; or null
  int32_t* tile_begin = nullptr;   ///< (max_tiles,) first row of a tile; or null
  int32_t* tile_end = nullptr;     ///< (max_tiles,) end of a tile's rows without gaps; or null
  int32_t max_tiles = 0;
  int32_t* num_tiles = nullptr;  ///< (1,) or null
  int32_t* num_rows = nullptr;   ///< (1,) the end of all rows; or null
  int32_t* counters = nullptr;   ///< (MOE_SORT_COUNTERS,) set to 0, for kernels that follow; or null

  int32_t* workspace = nullptr;  ///< MoeSortWorkspaceInts numbers; may be null if that is 0
  bool enable_pdl = false;
  bool has_clusters = false;  ///< the device is an SM90: blocks of a cluster may share the pairs
};

constexpr int32_t MOE_SORT_MAX_EXPERTS = 1024;
constexpr int32_t MOE_SORT_COUNTERS = 2;
constexpr int32_t MOE_SORT_BLOCK_PAIRS = 4096;  ///< pairs that one thread block sorts

/// Return the largest number of rows: each expert that has rows may have a gap.
constexpr int64_t MoeSortMaxRows(int64_t pairs, int64_t num_experts, int64_t align) {
  return (pairs + (pairs < num_experts ? pairs : num_experts) * (align - 1)) / align * align;
}

/// Return the largest number of tiles.
constexpr int64_t MoeSortMaxTiles(int64_t pairs, int64_t num_experts, int64_t tile) {
  return pairs <= num_experts ? pairs : (pairs + (tile - 1) * num_experts) / tile;
}

constexpr int64_t MoeSortWorkspaceInts(int64_t pairs, int64_t num_experts) {
  return pairs <= MOE_SORT_BLOCK_PAIRS ? 0 : (pairs + MOE_SORT_BLOCK_PAIRS - 1) / MOE_SORT_BLOCK_PAIRS * num_experts;
}

Status MoeSort(const MoeSortParams& params, Stream stream);

}  // namespace flashinfer
