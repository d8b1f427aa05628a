// SPDX-License-Identifier: Apache-2.0
// Loads of operand tiles to shared memory for the general GEMM kernel.
//
// A tile has a row of ROW_BYTES bytes of K per row of the operand; the 16-byte chunk c of row r lies in chunk
// c ^ (r % 8), so that eight rows of the same chunk, which ldmatrix reads together, are in different banks. A tile by
// columns has a row of weights per step of K instead (16-bit elements only); ldmatrix transposes it.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../../vec_dtypes.cuh"
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
  OperandLayout layout;
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

/// Transpose a chunk of COUNT rows: word i has element i of each row; rows[r] gets the elements of row r.
template <int BYTES, int COUNT>
__device__ __forceinline__ void TransposeWords(const uint32_t (&words)[COUNT * 4], uint32_t (&rows)[COUNT][4]) {
  static_assert(BYTES * COUNT == 4, "a word must hold one element of each row");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t* x = words + i * COUNT;
    if constexpr (COUNT == 4) {
      const uint32_t low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)};
      const uint32_t high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
      rows[0][i] = __byte_perm(low[0], low[1], 0x5410), rows[1][i] = __byte_perm(low[0], low[1], 0x7632);
      rows[2][i] = __byte_perm(high[0], high[1], 0x5410), rows[3][i] = __byte_perm(high[0], high[1], 0x7632);
    } else if constexpr (COUNT == 2) {
      rows[0][i] = __byte_perm(x[0], x[1], 0x5410), rows[1][i] = __byte_perm(x[0], x[1], 0x7632);
    } else {
      rows[0][i] = x[0];
    }
  }
}

/// Part of a tile of ROWS rows that one thread loads to registers and then stores to shared memory: chunks of
/// neighbouring rows, as many as have elements in one word, where the thread has enough of them.
template <int ROWS, int THREADS, typename T>
class Fetched {
 public:
  __device__ __forceinline__ void Fetch(const Operand<T>& x, int k, int k_end) {
#pragma unroll
    for (int i = 0; i < COUNT; i += GROUP) {
      int row, chunk;
      Place(x.layout.by_rows, i, row, chunk);
      if (GROUP == PER_WORD && x.layout.words && row + GROUP <= x.rows) {
        FetchWords(x, i, row, k + chunk * WIDTH, k_end);
      } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
          Place(x.layout.by_rows, i + j, row, chunk);
          chunks_[i + j] = Chunk(x, row, k + chunk * WIDTH, k_end);
        }
      }
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
  static constexpr int WIDTH = 16 / sizeof(T), COUNT = ROWS * 8 / THREADS, PER_WORD = 4 / sizeof(T);
  static constexpr int GROUP = COUNT % PER_WORD == 0 ? PER_WORD : 1;  // chunks of neighbouring rows
  static_assert(ROWS * 8 % THREADS == 0, "threads must share the chunks evenly");
  using Bits = typename Word<sizeof(T)>::type;

  static __device__ __forceinline__ void Place(bool by_rows, int i, int& row, int& chunk) {
    const int index = threadIdx.x + (by_rows ? i / GROUP : i) * THREADS;
    row = by_rows ? index % (ROWS / GROUP) * GROUP + i % GROUP : index / 8;
    chunk = by_rows ? index / (ROWS / GROUP) : index % 8;
  }

  /// Load the same chunk of GROUP rows that are neighbours in memory, in words.
  __device__ __forceinline__ void FetchWords(const Operand<T>& x, int i, int row, int k, int k_end) {
    if constexpr (GROUP == PER_WORD) {
      uint32_t words[WIDTH], rows[GROUP][4];
      const T* from = x.data + row + k * x.k_stride;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        words[j] = k + j < k_end ? *reinterpret_cast<const uint32_t*>(from + j * x.k_stride) : 0;
      }
      TransposeWords<int(sizeof(T))>(words, rows);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) chunks_[i + j] = uint4{rows[j][0], rows[j][1], rows[j][2], rows[j][3]};
    }
  }

  static __device__ __forceinline__ uint4 Chunk(const Operand<T>& x, int row, int k, int k_end) {
    if (row >= x.rows) return uint4{};
    const T* from = x.data + row * x.row_stride + k * x.k_stride;
    if (x.layout.chunks && k + WIDTH <= k_end) return *reinterpret_cast<const uint4*>(from);
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
