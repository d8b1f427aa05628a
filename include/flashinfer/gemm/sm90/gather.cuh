// SPDX-License-Identifier: Apache-2.0
// Rows of tokens that a producer finds by their numbers, so that a layer of experts does not write each token once per
// expert and read the copies from DRAM. Threads copy 16 bytes at a time to the places that a load through a tensor map
// would have written (128-byte swizzle). Rows beyond the end of the group are copies of its last row, or are not copied: what
// is in their place affects only results that are not stored.
#pragma once
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/cp_async.cuh"
#include "params.cuh"

namespace flashinfer {
namespace gemm {

constexpr int GATHER_WARPS = 2;  // producer warps that copy rows: a warp asks for 128 bytes of four rows at a time

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Find the rows of a that are every STEP-th row of the tile from row `first` on. All loads are in flight together.
template <int STEP, int COUNT>
__device__ __forceinline__ void FindRows(const GatheredRows& from, const Tile& tile, int first,
                                         uint32_t (&rows)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    rows[i] = uint32_t(from.indices[min(tile.row + first + STEP * i, tile.end_row - 1)]);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) rows[i] /= from.divisor;
}

/// Copies of the rows of one tile by the last GATHER_WARPS warps of the producer warpgroup. A thread copies the same 16 of
/// 128 bytes of every eighth row: their places differ by 1024 bytes, which the swizzle leaves alone, and addresses take one
/// instruction each.
template <int BLOCK_M>
class RowCopies {
 public:
  __device__ __forceinline__ RowCopies(const GemmParams& p, const Tile& tile) {
    const int thread = int(threadIdx.x) - (WARPGROUP - THREADS), first = thread / CHUNKS;
    const int column = thread % CHUNKS * CHUNK_BYTES;
    place_ = hopper::Swizzle128(first * SLAB_K_BYTES + column);
    from_ = p.gathered.data + column;
    has_second_half_ = tile.end_row - tile.row > BLOCK_M / 2;
    FindRows<STEP>(p.gathered, tile, first, chunks_);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) chunks_[i] *= p.gathered.stride_chunks;
  }

  /// Copy the next 128 bytes of each row to the stage at `to`.
  __device__ __forceinline__ void Run(uint32_t to) {
    to += place_;
    CopyRows<0>(to);
    if (has_second_half_) CopyRows<COUNT / 2>(to);  // rows of the second consumer warpgroup
    from_ += SLAB_K_BYTES;
  }

 private:
  static constexpr int THREADS = GATHER_WARPS * 32, CHUNKS = SLAB_K_BYTES / CHUNK_BYTES;
  static constexpr int STEP = THREADS / CHUNKS, COUNT = BLOCK_M / STEP;
  static_assert(STEP == 8, "the swizzle repeats every 8 rows");

  template <int FIRST>
  __device__ __forceinline__ void CopyRows(uint32_t to) const {
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT / 2; ++i) {
      ptx::CopyAsync16(to + i * STEP * SLAB_K_BYTES, from_ + uint64_t(chunks_[i]) * CHUNK_BYTES, true);
    }
  }

  uint32_t chunks_[COUNT];  // distance of each row from the first token
  const char* from_;        // this thread's bytes of the first token
  uint32_t place_;
  bool has_second_half_;
};

/// Copies of the scales of these rows by a warp, in place of ScaleCopies::RunTokens.
template <int BLOCK_M>
class RowScaleCopies {
 public:
  __device__ __forceinline__ RowScaleCopies(const GemmParams& p, const Tile& tile) : count_(tile.end_row - tile.row) {
    FindRows<32>(p.gathered, tile, threadIdx.x % 32, rows_);
  }

  __device__ __forceinline__ void Run(const GemmParams& p, uint32_t to, int kb) const {
    const float* const from = p.token_scale.data + kb * p.token_scale.k_stride;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 32; ++i) {
      const int row = int(threadIdx.x) % 32 + 32 * i;
      if (row < count_) ptx::CopyAsync4(to + 4 * row, from + rows_[i] * p.token_scale.row_stride);
    }
  }

 private:
  uint32_t rows_[BLOCK_M / 32];
  int count_;
};

#endif

}  // namespace gemm
}  // namespace flashinfer
