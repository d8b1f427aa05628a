// SPDX-License-Identifier: Apache-2.0
// Tile schedules on the device: the list of tiles that a block computes. A warp finds tiles with all its lanes.
#pragma once
#include "problem.h"
#include "../raster.h"

namespace flashinfer {
namespace gemm {

/// Parameters of the schedule. Two blocks that share loads have the same tile numbers and differ in their cluster rank.
struct TileParams {
  const int32_t* groups = nullptr;
  const int32_t* weight_indices = nullptr;
  int weights = 1;  // matrices that weight_indices may name
  int group_count = 0;
  int m = 0;        // rows per batch entry or masked group, or rows of all groups
  int batch = 1;    // number of problems; kBatched only
  int m_tiles = 0;  // tiles along M per batch entry, or pairs of tiles if `pair_m`; kMasked and kPacked: not used
  int n_tiles = 0;  // tiles along N, or pairs of tiles if `pair_n`
  int raster = 1;   // tiles along M per band; kMasked and kPacked: at most so many
  int32_t* counter = nullptr;  // tiles taken; null: blocks take them in turn
  bool pair_m = false, pair_n = false;
  Grouping grouping = Grouping::kBatched;

  FLASHINFER_HD bool IsCounted() const { return grouping == Grouping::kMasked || grouping == Grouping::kPacked; }
  FLASHINFER_HD int Total() const { return batch * m_tiles * n_tiles; }  // requires !IsCounted()
  FLASHINFER_HD int TilesAlongN() const { return pair_n ? 2 * n_tiles : n_tiles; }
};

/// Position of one tile in the operands.
struct alignas(16) Tile {
  bool exists;       // false: the tile is skipped (rows without a group, or whose group has no matrix)
  int row;           // first row of tokens
  int end_row;       // end of the rows of the same problem; may be inside or beyond the tile
  int n_tile;        // number of the tile along N
  int token_batch;   // batch or group of a and d
  int weight_batch;  // batch or group of b
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Search for tile numbers in groups of different sizes, 32 groups at a time: lane i holds group first + i.
template <int BLOCK_M>
class GroupFinder {
 public:
  __device__ __forceinline__ explicit GroupFinder(const TileParams& p) : p_(p) {
    if (p_.IsCounted()) Read(0, 0);
  }

  /// Find tile `t`. Returns false after the last tile. `t` must not decrease from call to call.
  __device__ __forceinline__ bool Find(int t, Tile& tile) {
    while (true) {
      const unsigned found = __ballot_sync(~0u, t < end_);
      if (found != 0) {
        tile = TileOf(t, __ffs(found) - 1);
        return true;
      }
      if (first_ + 32 >= p_.group_count) return false;
      Read(first_ + 32, __shfl_sync(~0u, end_, 31));
    }
  }

  /// Count all tiles. Call before the first Find().
  __device__ __forceinline__ int Count() {
    while (first_ + 32 < p_.group_count) Read(first_ + 32, __shfl_sync(~0u, end_, 31));
    const int total = __shfl_sync(~0u, end_, 31);
    if (p_.group_count > 32) Read(0, 0);
    return total;
  }

 private:
  __device__ __forceinline__ void Read(int first, int before) {
    const int lane = threadIdx.x % 32, g = first + lane;
    first_ = first, rows_ = 0, begin_row_ = 0;
    if (g < p_.group_count) {
      if (p_.grouping == Grouping::kMasked) {
        rows_ = max(0, min(p_.groups[g], p_.m));
      } else {
        begin_row_ = p_.groups[g];
        rows_ = p_.groups[g + 1] - begin_row_;
      }
    }
    const int tiles = CeilDivide(rows_, BLOCK_M) * p_.n_tiles;
    end_ = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(~0u, end_, offset);
      if (lane >= offset) end_ += below;
    }
    end_ += before;
    begin_ = end_ - tiles;
  }

  __device__ __forceinline__ Tile TileOf(int t, int lane) const {
    const int rows = __shfl_sync(~0u, rows_, lane), begin_row = __shfl_sync(~0u, begin_row_, lane);
    const int rest = t - __shfl_sync(~0u, begin_, lane), group = first_ + lane;
    const int m_tiles = CeilDivide(rows, BLOCK_M);
    const TileIndex at = TileOfGroup(rest, m_tiles);
    const int token_batch = p_.grouping == Grouping::kMasked ? group : 0;
    const int weight_batch = p_.weight_indices == nullptr ? group : p_.weight_indices[group];
    const bool exists = p_.weight_indices == nullptr || unsigned(weight_batch) < unsigned(p_.weights);
    return {exists, begin_row + at.m * BLOCK_M, begin_row + rows, at.n, token_batch, weight_batch};
  }

  /// Return the position of tile `t` of a group. Groups of few rows are common and their tiles take less time than the
  /// divisions of bands.
  __device__ __forceinline__ TileIndex TileOfGroup(int t, int m_tiles) const {
    if (m_tiles == 1) return {0, 0, t};
    if (m_tiles <= p_.raster) return {0, t % m_tiles, t / m_tiles};
    return RasterTile(t, m_tiles, p_.n_tiles, BandHeight(m_tiles, p_.raster));
  }

  const TileParams& p_;
  int first_ = 0, rows_ = 0, begin_row_ = 0, begin_ = 0, end_ = 0;
};

/// Tile list of any grouping.
template <int BLOCK_M>
class TileList {
 public:
  __device__ __forceinline__ TileList(const TileParams& p, int rank) : p_(p), rank_(rank), finder_(p) {}

  /// Get tile number `t`. Returns false after the last tile.
  __device__ __forceinline__ bool Get(int t, Tile& tile) {
    if (p_.IsCounted()) {
      if (!finder_.Find(t, tile)) return false;
    } else {
      if (t >= p_.Total()) return false;
      const TileIndex at = RasterTile(t, p_.m_tiles, p_.n_tiles, p_.raster);
      const int row = (p_.pair_m ? 2 * at.m + rank_ : at.m) * BLOCK_M;
      tile = {true, row, p_.m, at.n, at.batch, at.batch};
      if (p_.grouping == Grouping::kContiguous) {
        tile.weight_batch = p_.groups[row];
        tile.exists = unsigned(tile.weight_batch) < unsigned(p_.group_count);
      }
    }
    if (p_.pair_n) tile.n_tile = 2 * tile.n_tile + rank_;
    return true;
  }

  __device__ __forceinline__ int Count() { return p_.IsCounted() ? finder_.Count() : p_.Total(); }

 private:
  const TileParams& p_;
  const int rank_;
  GroupFinder<BLOCK_M> finder_;
};

#endif

}  // namespace gemm
}  // namespace flashinfer
