// SPDX-License-Identifier: Apache-2.0
// Stores of a warpgroup's results: fp32 accumulators are scaled, given the bias, rounded and written to global memory
// from registers. Lanes of a warp exchange elements first, so that each lane writes 16 contiguous bytes of a row (8
// where weights are on the M side). No shared memory and no barrier: warps store independently, and a block keeps its
// whole shared memory for the ring.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ptx/movmatrix.cuh"
#include "params_sm90.cuh"

namespace flashinfer {
namespace gemm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t PackPair(float x, float y, bool is_half) {
  if (is_half) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Return the bias of column `c`, zero where there is none.
__device__ __forceinline__ float BiasOf(const GemmParams& p, int c) {
  return p.bias == nullptr || c >= p.n ? 0.f : __bfloat162float(p.bias[c]);
}

/// Transpose a 4 x 4 matrix of words among four neighbouring lanes: afterwards x[i] is what lane i of the four had in
/// x[lane].
__device__ __forceinline__ void TransposeQuad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool is_upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? x[i] : x[i + bit], bit);
      (is_upper ? x[i] : x[i + bit]) = other;
    }
  }
}

/// Write `COUNT` words, two 16-bit elements each, to the columns from `c`; columns from p.n on are dropped.
template <int COUNT>
__device__ __forceinline__ void StoreWords(const GemmParams& p, uint16_t* row, int c, const uint32_t (&x)[COUNT]) {
  if (c + 2 * COUNT <= p.n) {
    if constexpr (COUNT == 4) {
      *reinterpret_cast<uint4*>(row + c) = uint4{x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<uint2*>(row + c) = uint2{x[0], x[1]};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * COUNT; ++i) {
    if (c + i < p.n) row[c + i] = uint16_t(x[i / 2] >> (16 * (i % 2)));
  }
}

/// Return the row of results of token `row`, as T.
template <typename T>
__device__ __forceinline__ T* RowOf(const GemmParams& p, const Tile& tile, int row) {
  return static_cast<T*>(p.d) + tile.token_batch * p.d_batch_stride + row * p.d_stride;
}

/// Store 64 rows of tokens by COLUMNS from (row, column): accumulators with tokens on the M side.
template <int COLUMNS>
__device__ __forceinline__ void StoreRows(const GemmParams& p, float (&d)[COLUMNS / 2], float scale, int column,
                                          const Tile& tile, int row) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int first = row + int(threadIdx.x) % WARPGROUP / 32 * 16 + lane / 4;
  const bool has_row[2] = {first < tile.end_row, first + 8 < tile.end_row};
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const int c = column + 8 * j + 2 * quad;
    const float bias[2] = {BiasOf(p, c), BiasOf(p, c + 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * j + i] = fmaf(d[4 * j + i], scale, bias[i % 2]);
  }
  if (p.out == Element::kFloat32) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!has_row[h]) continue;
      float* const to = RowOf<float>(p, tile, first + 8 * h) + column;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int c = 8 * j + 2 * quad;
        if (column + c < p.n) to[c] = d[4 * j + 2 * h];
        if (column + c + 1 < p.n) to[c + 1] = d[4 * j + 2 * h + 1];
      }
    }
    return;
  }
  const bool is_half = p.out == Element::kFloat16;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = d + 4 * (j + i) + 2 * h;
        words[i] = PackPair(x[0], x[1], is_half);
      }
      TransposeQuad(words, lane);
      if (has_row[h]) StoreWords(p, RowOf<uint16_t>(p, tile, first + 8 * h), column + 8 * (j + quad), words);
    }
  }
}

/// Store TOKENS rows of tokens by 64 columns: accumulators with weights on the M side, transposed inside each warp.
template <int TOKENS>
__device__ __forceinline__ void StoreTransposed(const GemmParams& p, float (&d)[TOKENS / 2], float scale, int column,
                                                const Tile& tile) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int warp_column = column + int(threadIdx.x) % WARPGROUP / 32 * 16;
  const float bias[2] = {BiasOf(p, warp_column + lane / 4), BiasOf(p, warp_column + lane / 4 + 8)};
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) d[i] = fmaf(d[i], scale, bias[i % 4 / 2]);
  if (p.out == Element::kFloat32) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int token = tile.row + i / 4 * 8 + 2 * quad + i % 2, c = warp_column + lane / 4 + i % 4 / 2 * 8;
      if (token < tile.end_row && c < p.n) RowOf<float>(p, tile, token)[c] = d[i];
    }
    return;
  }
  const bool is_half = p.out == Element::kFloat16;
#pragma unroll
  for (int j = 0; j < TOKENS / 8; ++j) {
    const uint32_t low = ptx::TransposeMatrix(PackPair(d[4 * j], d[4 * j + 1], is_half));
    const uint32_t high = ptx::TransposeMatrix(PackPair(d[4 * j + 2], d[4 * j + 3], is_half));
    // Even lanes collect four of the lower eight weights, odd lanes four of the upper eight.
    const uint32_t other = __shfl_xor_sync(~0u, quad % 2 ? low : high, 1);
    const uint32_t words[2] = {quad % 2 ? other : low, quad % 2 ? high : other};
    const int token = tile.row + 8 * j + lane / 4;
    if (token < tile.end_row) {
      StoreWords(p, RowOf<uint16_t>(p, tile, token), warp_column + quad % 2 * 8 + quad / 2 * 4, words);
    }
  }
}

/// Return the product of the per-tensor scales in device memory; a missing scale is 1.
__device__ __forceinline__ float TensorScale(const GemmParams& p) {
  const float a = p.token_scale.data == nullptr ? 1.f : *p.token_scale.data;
  return p.weight_scale.data == nullptr ? a : a * *p.weight_scale.data;
}

#endif

}  // namespace gemm
}  // namespace flashinfer
