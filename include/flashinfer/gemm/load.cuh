// SPDX-License-Identifier: Apache-2.0
// Loads of operand tiles to shared memory for the general GEMM kernel.
//
// A tile has a row of ROW_BYTES bytes of K per row of the operand; the 16-byte chunk c of row r lies in chunk
// c ^ (r % 8), so that eight rows of the same chunk, which ldmatrix reads together, are in different banks. A tile by
// columns has a row of weights per step of K instead (16-bit elements only); ldmatrix transposes it.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../vec_dtypes.cuh"
#include "choose.h"

namespace flashinfer {
namespace gemm {

/// 8-bit element of a format that is known at run time.
struct Fp8 {
  uint8_t bits;
};

/// Rows of an operand from the first of a tile on.
template <typename T>
struct Operand {
  const T* data;
  int64_t row_stride, k_stride;
  int rows;  // rows that exist; others count as zero
  bool chunks, by_rows;
};

/// Return the byte offset of a chunk in a tile with rows of K.
FLASHINFER_HD constexpr int RowChunk(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row % 8)) * 16); }

/// Return the byte offset of a chunk of 8 columns in a tile with rows of COLUMNS 16-bit elements.
template <int COLUMNS>
FLASHINFER_HD constexpr int ColumnChunk(int k, int chunk) {
  static_assert(COLUMNS == 32 || COLUMNS % 64 == 0, "a row must be 64 bytes or a multiple of 128");
  return k * COLUMNS * 2 + ((chunk ^ (COLUMNS == 32 ? k / 2 % 4 : k % 8)) * 16);
}

/// Start copies of ROWS rows, K from `k` on. `k_end` and the strides are multiples of 16 bytes.
template <int ROWS, int THREADS, typename T>
__device__ __forceinline__ void CopyRows(uint32_t to, const Operand<T>& x, int k, int k_end) {
  constexpr int WIDTH = 16 / sizeof(T), STEP = THREADS / 8;
  static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "threads must cover whole groups of 8 rows");
  const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
  const bool in_range = k + chunk * WIDTH < k_end;
  const T* from = x.data + first * x.row_stride + k + chunk * WIDTH;
  to += RowChunk(first, chunk);
#pragma unroll
  for (int row = 0; row < ROWS; row += STEP) {
    ptx::CopyAsync16(to + row * ROW_BYTES, from + row * x.row_stride, in_range && first + row < x.rows);
  }
}

/// Start copies of ROW_BYTES / 2 steps of K from `k` on, each COLUMNS rows of the operand, which are contiguous.
template <int COLUMNS, int THREADS, typename T>
__device__ __forceinline__ void CopyColumns(uint32_t to, const Operand<T>& x, int k, int k_end) {
  static_assert(sizeof(T) == 2, "only 16-bit elements are transposed by ldmatrix");
  constexpr int CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS, DEPTH = ROW_BYTES / 2;
  static_assert(DEPTH % STEP == 0 && STEP % 8 == 0, "threads must cover whole groups of 8 steps");
  const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
  const bool in_range = chunk * 8 < x.rows;
  const T* from = x.data + (k + first) * x.k_stride + chunk * 8;
  to += ColumnChunk<COLUMNS>(first, chunk);
#pragma unroll
  for (int i = 0; i < DEPTH; i += STEP) {
    ptx::CopyAsync16(to + i * COLUMNS * 2, from + i * x.k_stride, in_range && k + first + i < k_end);
  }
}

/// Part of a tile of ROWS rows that one thread loads to registers and then stores to shared memory.
template <int ROWS, int THREADS, typename T>
class Fetched {
 public:
  __device__ __forceinline__ void Fetch(const Operand<T>& x, int k, int k_end) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int row, chunk;
      Place(x.by_rows, i, row, chunk);
      chunks_[i] = Chunk(x, row, k + chunk * WIDTH, k_end);
    }
  }

  __device__ __forceinline__ void Store(uint32_t to, bool by_rows) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int row, chunk;
      Place(by_rows, i, row, chunk);
      ptx::StoreShared16(to + RowChunk(row, chunk), chunks_[i]);
    }
  }

 private:
  static constexpr int WIDTH = 16 / sizeof(T), COUNT = ROWS * 8 / THREADS;
  static_assert(ROWS * 8 % THREADS == 0, "threads must share the chunks evenly");
  using Bits = typename Word<sizeof(T)>::type;

  static __device__ __forceinline__ void Place(bool by_rows, int i, int& row, int& chunk) {
    const int index = threadIdx.x + i * THREADS;
    row = by_rows ? index % ROWS : index / 8;
    chunk = by_rows ? index / ROWS : index % 8;
  }

  static __device__ __forceinline__ uint4 Chunk(const Operand<T>& x, int row, int k, int k_end) {
    if (row >= x.rows) return uint4{};
    const T* from = x.data + row * x.row_stride + k * x.k_stride;
    if (x.chunks && k + WIDTH <= k_end) return *reinterpret_cast<const uint4*>(from);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      uint32_t bits = 0;
      if (k + i < k_end) bits = *reinterpret_cast<const Bits*>(from + i * x.k_stride);
      words[i * sizeof(T) / 4] |= bits << (i * sizeof(T) % 4 * 8);
    }
    return uint4{words[0], words[1], words[2], words[3]};
  }

  uint4 chunks_[COUNT];
};

}  // namespace gemm
}  // namespace flashinfer
