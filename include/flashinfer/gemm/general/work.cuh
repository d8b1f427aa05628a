// SPDX-License-Identifier: Apache-2.0
// Work of the general GEMM kernel: the plan that the host passes, the tiles of results that blocks compute, and the
// steps along K of each tile.
#pragma once
#include "../../gemm.h"
#include "../raster.h"

namespace flashinfer {
namespace gemm {

/// Bytes of K in a row of a shared-memory tile: 64 elements of 16 bits, 128 of 8 bits or 32 of 32 bits.
constexpr int ROW_BYTES = 128;
constexpr int RASTER = 8;  // tiles along M that run together, so that concurrent blocks share rows in L2

/// Ways to load an operand through registers.
struct OperandLayout {
  bool chunks = false;   // 16 bytes along K at once
  bool by_rows = false;  // neighbours in memory are rows, not K: neighbouring threads load rows
  bool words = false;    // the same, and 4 bytes along the rows at once
};

/// A product as the kernel gets it.
struct GemmPlan {
  GemmArguments x;
  int m = 0, n = 0, k = 0, batch = 1;
  int depth = 1;                 // elements of K with the same scales: sums of products before scaling
  int k_steps = 0;               // ROW_BYTES of K, or what is left of `depth`, per step
  int m_tiles = 0, n_tiles = 0;  // m_tiles: per problem; not used with groups of different sizes
  OperandLayout a_layout, b_layout;
  bool d_chunks = false, d_by_rows = false;  // 16 bytes along N at once; neighbours in memory are rows
};

/// Range [begin, end) of K of one step. Steps do not cross multiples of `depth`; what a step lacks counts as zero.
struct KStep {
  int begin, block_end;

  FLASHINFER_HD static KStep First(const GemmPlan& p) { return {0, p.depth < p.k ? p.depth : p.k}; }
  FLASHINFER_HD bool EndsBlock(int step_elements) const { return begin + step_elements >= block_end; }
  FLASHINFER_HD void Next(const GemmPlan& p, int step_elements) {
    begin += step_elements;
    if (begin < block_end) return;
    begin = block_end;
    block_end = p.k - block_end < p.depth ? p.k : block_end + p.depth;
  }
};

/// Return the number of steps along K.
FLASHINFER_HD constexpr int KSteps(int k, int depth, int step_elements) {
  return k / depth * CeilDivide(depth, step_elements) + CeilDivide(k % depth, step_elements);
}

/// Position of a tile of results in the operands.
struct WorkTile {
  bool exists;       // false: rows without a group
  int row, rows;     // first row of tokens, number of rows in the tile and before the end of its group
  int column;        // first row of weights
  int token_batch;   // batch entry of a and d
  int weight_batch;  // matrix of b
};

/// Number of tiles of problems whose sizes the host knows: batches, and groups given by row.
FLASHINFER_HD int64_t KnownTiles(const GemmPlan& p) {
  return int64_t(p.m_tiles) * p.n_tiles * (p.x.grouping == Grouping::kBatched ? p.batch : 1);
}

FLASHINFER_HD bool HasCounts(const GemmPlan& p) {
  return p.x.grouping == Grouping::kMasked || p.x.grouping == Grouping::kPacked;
}

/// Return tile `t` of problems whose sizes the host knows, t < KnownTiles(p).
template <int BLOCK_M, int BLOCK_N>
FLASHINFER_HD WorkTile KnownTile(const GemmPlan& p, int t) {
  const TileIndex at = RasterTile(t, p.m_tiles, p.n_tiles, p.m_tiles < RASTER ? p.m_tiles : RASTER);
  const int row = at.m * BLOCK_M, left = p.m - row;
  WorkTile tile{true, row, left < BLOCK_M ? left : BLOCK_M, at.n * BLOCK_N, at.batch, at.batch};
  if (p.x.grouping == Grouping::kContiguous) {
    tile.weight_batch = p.x.groups[row];
    tile.exists = unsigned(tile.weight_batch) < unsigned(p.batch);
  }
  return tile;
}

/// Return tile `t` of the group with rows [begin, begin + rows), t < CeilDivide(rows, BLOCK_M) * p.n_tiles.
template <int BLOCK_M, int BLOCK_N>
FLASHINFER_HD WorkTile GroupTile(const GemmPlan& p, int t, int group, int begin, int rows) {
  const int m_tiles = CeilDivide(rows, BLOCK_M);
  const TileIndex at = RasterTile(t, m_tiles, p.n_tiles, m_tiles < RASTER ? m_tiles : RASTER);
  const int left = rows - at.m * BLOCK_M;
  const int weight = p.x.weight_indices == nullptr ? group : p.x.weight_indices[group];
  const int token_batch = p.x.grouping == Grouping::kMasked ? group : 0;
  const bool exists = p.x.weight_indices == nullptr || unsigned(weight) < unsigned(p.x.weights);
  return {exists, begin + at.m * BLOCK_M, left < BLOCK_M ? left : BLOCK_M, at.n * BLOCK_N, token_batch, weight};
}

#if defined(__CUDACC__) || defined(FLASHINFER_EMULATED)  // tests/emulation

/// Find tile number `t` among groups whose sizes are on the device, 32 groups at a time. All lanes of a warp call it
/// with the same `t`. Returns false after the last tile.
template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ bool FindGroupTile(const GemmPlan& p, int64_t t, WorkTile& tile) {
  const int lane = threadIdx.x % 32;
  int64_t before = 0;  // tiles of the groups already passed
  for (int first = 0; first < p.batch; first += 32) {
    const int group = first + lane;
    int begin = 0, rows = 0;
    if (group < p.batch) {
      if (p.x.grouping == Grouping::kMasked) {
        rows = min(p.x.groups[group], p.m);
      } else {
        begin = p.x.groups[group];
        rows = min(p.x.groups[group + 1], p.m) - begin;
      }
    }
    rows = max(rows, 0);
    const int tiles = CeilDivide(rows, BLOCK_M) * p.n_tiles;
    int end = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(~0u, end, offset);
      if (lane >= offset) end += below;
    }
    const unsigned found = __ballot_sync(~0u, t < before + end);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      const int in_group = int(t - before) - __shfl_sync(~0u, end - tiles, owner);
      begin = __shfl_sync(~0u, begin, owner), rows = __shfl_sync(~0u, rows, owner);
      tile = GroupTile<BLOCK_M, BLOCK_N>(p, in_group, first + owner, begin, rows);
      return true;
    }
    before += __shfl_sync(~0u, end, 31);
  }
  return false;
}

/// Get tile number `t`, the same in all threads of the block. Returns false after the last tile.
template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ bool GetTile(const GemmPlan& p, int64_t t, WorkTile& tile) {
  if (HasCounts(p)) return FindGroupTile<BLOCK_M, BLOCK_N>(p, t, tile);
  if (t >= KnownTiles(p)) return false;
  tile = KnownTile<BLOCK_M, BLOCK_N>(p, int(t));
  return true;
}

#endif

}  // namespace gemm
}  // namespace flashinfer
