// SPDX-License-Identifier: Apache-2.0
// Weights in kernel.cuh: how a warp copies a stage of 16 rows to shared memory, and multiplies it by tokens.
//
// Rows of weights are rows of A of m16n8k16, tokens are columns of B. A sum over k does not depend on the order of k: a lane
// takes 16 contiguous bytes of a row of weights and the elements of a token at the same columns as its parts of several
// products, so that neither needs ldmatrix, nor a layout that the tensor cores prescribe.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/shared.cuh"
#include "shape.h"
#include "order.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

/// Weights of one product.
struct Matrix {
  const void* data;  // (experts, rows, columns)
  int rows, columns;
  int second;  // distance of the rows 8 to 15 of a tile from rows 0 to 7, less 8: the halves of gated weights
  int first;   // row 0 of a tile, for row 0 of the copy order
};

/// Load what a lane multiplies. Hidden values come from other SMs: not through L1.
template <int PRODUCT, typename Word>
__device__ __forceinline__ Word LoadElements(const void* from) {
  if (PRODUCT == 2) return __ldcg(static_cast<const Word*>(from));
  return *static_cast<const Word*>(from);
}

constexpr int ROW_BYTES = 128;  // bytes of a row in a stage
constexpr int STAGE_BYTES = TILE_ROWS * ROW_BYTES;

/// Return the address of 16 bytes in a stage: rows of even and odd number have their halves exchanged, so that 8 lanes of two
/// rows read 128 bytes from all banks.
__device__ __forceinline__ uint32_t InStage(uint32_t stage, int row, int unit) {
  return stage + row * ROW_BYTES + (unit ^ (row & 1) * 4) * 16;
}

/// Begin to copy a stage of row-major 16-bit weights; `used` rows of each 8, or of all 16.
__device__ __forceinline__ void RequestRows(uint32_t stage, const Matrix& m, int expert, int row, int used, int chunk,
                                            bool is_paired) {
  const int lane = int(threadIdx.x) % 32, unit = lane % 8;
  const int column = (chunk * ROW_BYTES + unit * 16) / 2;
  const bool has_column = column < m.columns;
  const int64_t row_bytes = int64_t(m.columns) * 2;
  const auto* from = static_cast<const unsigned char*>(m.data) +
                     (int64_t(expert) * m.rows + m.first + row + lane / 8) * row_bytes + (has_column ? column : 0) * 2;
  const uint32_t to = InStage(stage, lane / 8, unit);  // rows of a lane are 4 apart: the same exchange of halves
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 4; ++i) {
    const int in_tile = lane / 8 + 4 * i;
    if ((is_paired ? in_tile % 8 : in_tile) < used) {  // what another row has been stays; nobody reads its sums
      ptx::CopyAsync16(to + 4 * i * ROW_BYTES, from, has_column);
    }
    from += (i == 1 ? 4 + m.second : 4) * row_bytes;
  }
}

/// bf16 or fp16, row major.
template <typename T>
struct PlainWeights {
  using Element = T;
  static constexpr int COLUMNS = ROW_BYTES / 2, BYTES = STAGE_BYTES;  // size of a stage
  static constexpr int WARPS = PLAIN_WARPS, STAGES = PLAIN_STAGES;
  static constexpr int VECTORS = 2;  // pieces of 16 bytes that a lane has of a token

  __device__ __forceinline__ static void Request(uint32_t stage, const Matrix& m, int expert, int row, int used,
                                                 int chunk, bool is_paired) {
    RequestRows(stage, m, expert, row, used, chunk, is_paired);
  }

  /// Load the elements of a token; `x` is its row, null: zeros.
  template <int PRODUCT>
  __device__ __forceinline__ static void LoadToken(const T* x, int chunk, int columns, uint4 (&to)[VECTORS]) {
#pragma unroll
    for (int g = 0; g < VECTORS; ++g) {
      const int column = chunk * COLUMNS + (4 * g + int(threadIdx.x) % 4) * 8;
      to[g] = uint4{};
      if (x != nullptr && column < columns) to[g] = LoadElements<PRODUCT, uint4>(x + column);
    }
  }

  template <int TILES>
  __device__ __forceinline__ static void Multiply(uint32_t stage, const uint4 (&tokens)[TILES][VECTORS],
                                                  float (&sums)[TILES][4]) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int g = 0; g < VECTORS; ++g) {
      uint32_t low[4], high[4];  // rows lane / 4 and lane / 4 + 8
      ptx::LoadFragment(low, InStage(stage, lane / 4, 4 * g + lane % 4));
      ptx::LoadFragment(high, InStage(stage, lane / 4 + 8, 4 * g + lane % 4));
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint4& x = tokens[t][g];
        ptx::Mma<T>(sums[t], {low[0], high[0], low[1], high[1]}, x.x, x.y);
        ptx::Mma<T>(sums[t], {low[2], high[2], low[3], high[3]}, x.z, x.w);
      }
    }
  }
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
