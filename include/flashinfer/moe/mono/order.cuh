// SPDX-License-Identifier: Apache-2.0
// Work of a block and of its warps in kernel.cuh. A block has a range of rows of each product, cut into tiles of up to 16
// rows; a warp has some chunks of columns of each tile. Which chunks does not depend on other tokens: sums of a token
// have the same order in every batch.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int TILE_ROWS = 16;

/// State that all warps of a block share.
struct Work {
  const int32_t* active;  // local numbers of the experts in use, ascending; shared memory
  int active_count;
  int begin1, end1;    // units (pairs of rows, or rows) of all active experts
  int begin2, end2;    // rows of the output
  int units1, height;  // units of an expert; units of a tile of GEMM 1
  int chunks1, chunks2;
};

/// Stages of a warp in order: tiles of GEMM 1, then those of GEMM 2, and the chunks of each. Warps change their parts
/// from tile to tile, because the number of chunks is no multiple of that of warps.
template <int WARPS>
class CopyOrder {
 public:
  static_assert((WARPS & (WARPS - 1)) == 0, "a power of two");
  int product = 1, tile = 0;
  int row = 0, rows = 0;  // units of GEMM 1, rows of GEMM 2
  int active = 0, chunk = 0;

  __device__ __forceinline__ CopyOrder(const Work& work, int warp, int product_) : product(product_), warp_(warp) {
    if (product == 1) {
      active = work.begin1 / work.units1, row = work.begin1 - active * work.units1;
      left_ = work.end1 - work.begin1;
      if (left_ <= 0) product = 2;
    }
    if (product == 2) Enter2(work);
    StartTile(work);
  }

  __device__ __forceinline__ bool IsDone() const { return left_ <= 0; }
  /// Return true if this warp has a chunk (left) in the tile.
  __device__ __forceinline__ bool HasStage(const Work& work) const {
    return product == 1 ? chunk < work.chunks1 : active < work.active_count;
  }
  /// Return the part of the chunks that this warp has in the tile.
  __device__ __forceinline__ int Part() const { return (warp_ + 3 * tile) & (WARPS - 1); }

  __device__ __forceinline__ void NextStage(const Work& work) {
    chunk += WARPS;
    if (product == 2 && chunk >= work.chunks2) FindExpert(work, active + 1);
  }
  /// Go to the next tile, and with the last one of GEMM 1 to GEMM 2.
  __device__ __forceinline__ void NextTile(const Work& work) {
    left_ -= rows, row += rows, ++tile;
    if (product == 1 && left_ > 0 && row == work.units1) row = 0, ++active;
    if (product == 1 && left_ <= 0) {
      product = 2;
      Enter2(work);
    }
    StartTile(work);
  }
  /// Go to the next stage of any tile.
  __device__ __forceinline__ void Advance(const Work& work) {
    NextStage(work);
    SkipEmpty(work);
  }
  __device__ __forceinline__ void SkipEmpty(const Work& work) {
    while (!IsDone() && !HasStage(work)) NextTile(work);
  }

 private:
  __device__ __forceinline__ void Enter2(const Work& work) {
    row = work.begin2, left_ = work.end2 - work.begin2, tile = 0;
  }
  __device__ __forceinline__ void StartTile(const Work& work) {
    if (left_ <= 0) return;
    if (product == 1) {
      rows = min(min(work.height, left_), work.units1 - row);
      chunk = Part();
    } else {
      rows = min(TILE_ROWS, left_);
      FindExpert(work, 0);
    }
  }
  /// Find the first expert from `from` on with a chunk for this warp. Chunk 0 of expert e belongs to part e * chunks2.
  __device__ __forceinline__ void FindExpert(const Work& work, int from) {
    for (active = from; active < work.active_count; ++active) {
      chunk = (Part() - work.active[active] * work.chunks2) & (WARPS - 1);
      if (chunk < work.chunks2) return;
    }
  }

  int warp_, left_ = 0;
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
