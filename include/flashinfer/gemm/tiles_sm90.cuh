// SPDX-License-Identifier: Apache-2.0
// Which tiles a block computes: the device side of the schedules. All warps of a block, the producer's and the consumers',
// walk the same list; each finds the tiles by itself, with all its lanes.
#pragma once
#include "entries_sm90.h"
#include "schedule_sm90.h"

namespace flashinfer {
namespace gemm {

/// What the schedule depends on. Pairs of blocks that share loads have the same numbers and differ in their rank.
struct TileParams {
  const int32_t* groups = nullptr;
  int group_count = 0;
  int m = 0;        // rows of one batch or masked group, or of all groups
  int batch = 1;    // kBatched only
  int m_tiles = 0;  // of one batch; pairs of tiles where `pair_m`. kMasked and kPacked: not used
  int n_tiles = 0;  // pairs of tiles where `pair_n`
  int raster = 1;
  bool pair_m = false, pair_n = false;
  Grouping grouping = Grouping::kBatched;

  FLASHINFER_HD bool IsCounted() const { return grouping == Grouping::kMasked || grouping == Grouping::kPacked; }
  FLASHINFER_HD int Total() const { return batch * m_tiles * n_tiles; }  // not IsCounted()
};

/// One tile.
struct Tile {
  bool exists;       // false: this number has nothing to do
  int row;           // first row of tokens
  int end_row;       // first row of tokens that is not of the same problem; may be in or beyond the tile
  int n_tile;        // number of the tile along N
  int token_batch;   // batch or group of a and d
  int weight_batch;  // of b
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Finder of tile numbers in groups of different sizes, 32 groups at a time: lane i knows group first + i.
template <int BLOCK_M>
class GroupFinder {
 public:
  __device__ __forceinline__ explicit GroupFinder(const TileParams& p) : p_(p) {
    if (p_.IsCounted()) Read(0, 0);
  }

  /// Find tile `t`; false after the last. Numbers may only grow from call to call.
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

  /// Count all tiles. Before the first Find().
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
    const int m_tiles = CeilDivide(rows, BLOCK_M), n_tile = rest / m_tiles;
    const int m_tile = rest - n_tile * m_tiles;  // M first: weights that are in L2 are used again at once
    const int token_batch = p_.grouping == Grouping::kMasked ? group : 0;
    return {true, begin_row + m_tile * BLOCK_M, begin_row + rows, n_tile, token_batch, group};
  }

  const TileParams& p_;
  int first_ = 0, rows_ = 0, begin_row_ = 0, begin_ = 0, end_ = 0;
};

/// The tiles of any grouping.
template <int BLOCK_M>
class TileList {
 public:
  __device__ __forceinline__ TileList(const TileParams& p, int rank) : p_(p), rank_(rank), finder_(p) {}

  /// Get tile number `t`; false after the last.
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
        tile.exists = tile.weight_batch >= 0;
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
