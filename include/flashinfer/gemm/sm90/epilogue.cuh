// SPDX-License-Identifier: Apache-2.0
// Stores of a warpgroup's results: fp32 accumulators are scaled, given the bias, rounded and written to global memory.
// With tokens on the M side, each warp stages 16 rows by 64 columns in its own 2 KB of shared memory and writes whole
// lines of 128 bytes: no barrier, no wait for copies. (Lines written in halves, from registers, took 240 us instead of
// 180 where results are most of the traffic: 4096 x 32768 x 512, H200.) With weights on the M side, warps transpose 8 x
// 8 matrices among their lanes and write from registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../hopper/smem_tile.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/movmatrix.cuh"
#include "../../ptx/stmatrix.cuh"
#include "params.cuh"

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

/// Store the 16 rows of a warp, by WIDTH columns (16 to 64), from registers to (row, column). `words` are the pairs of the
/// wgmma fragment: words[2 j + h] has columns 8 j + 2 (lane % 4) of row lane / 4 + 8 h. `staging`: the warp's 2 KB.
template <int WIDTH>
__device__ __forceinline__ void StoreSlab(const GemmParams& p, const uint32_t (&words)[WIDTH / 4], uint32_t staging,
                                          const Tile& tile, int row, int column) {
  static_assert(WIDTH % 16 == 0 && WIDTH <= 64, "pairs of matrices");
  const int lane = threadIdx.x % 32;
  const int matrix_row = lane % 8 + (lane & 8), matrix_chunk = lane / 16;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; j += 2) {
    const uint32_t at = hopper::Swizzle128(matrix_row * hopper::SLAB_ROW_BYTES + (j + matrix_chunk) * 16);
    ptx::StoreMatrix4(staging + at, words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]);
  }
  __syncwarp();
  const int chunk = lane % 8;
  uint32_t lines[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = hopper::Swizzle128((4 * i + lane / 8) * hopper::SLAB_ROW_BYTES + chunk * 16);
    const float4 x = ptx::LoadShared16(staging + at);
    lines[i][0] = __float_as_uint(x.x), lines[i][1] = __float_as_uint(x.y);
    lines[i][2] = __float_as_uint(x.z), lines[i][3] = __float_as_uint(x.w);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + 4 * i + lane / 8;
    if (r < tile.end_row && chunk < WIDTH / 8) {
      StoreWords(p, RowOf<uint16_t>(p, tile, r), column + 8 * chunk, lines[i]);
    }
  }
}

/// Round the 16 rows of a warp, by WIDTH columns, and store them at (row, column). `d`: a wgmma fragment.
template <int WIDTH = 64>
__device__ __forceinline__ void StoreRounded(const GemmParams& p, const float* d, uint32_t staging, const Tile& tile,
                                             int row, int column) {
  const bool is_half = p.out == Element::kFloat16;
  uint32_t words[WIDTH / 4];
#pragma unroll
  for (int i = 0; i < WIDTH / 4; ++i) words[i] = PackPair(d[2 * i], d[2 * i + 1], is_half);
  StoreSlab<WIDTH>(p, words, staging, tile, row, column);
}

/// Store 64 rows of tokens by COLUMNS from (row, column): accumulators with tokens on the M side.
template <int COLUMNS>
__device__ __forceinline__ void StoreRows(const GemmParams& p, float (&d)[COLUMNS / 2], float scale, uint32_t staging,
                                          int column, const Tile& tile, int row) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int warp_row = row + int(threadIdx.x) % WARPGROUP / 32 * 16;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] *= scale;
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] += BiasOf(p, column + i / 4 * 8 + 2 * quad + i % 2);
  }
  if (p.out == Element::kFloat32) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = warp_row + lane / 4 + 8 * h;
      if (r >= tile.end_row) continue;
      float* const to = RowOf<float>(p, tile, r);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i += 4) {
        const int c = column + 2 * i + 2 * quad;
        if (c + 1 < p.n) {  // rows begin at multiples of 16 bytes
          *reinterpret_cast<float2*>(to + c) = float2{d[i + 2 * h], d[i + 2 * h + 1]};
        } else if (c < p.n) {
          to[c] = d[i + 2 * h];
        }
      }
    }
    return;
  }
#pragma unroll
  for (int slab = 0; slab < COLUMNS / 64; ++slab) {
    StoreRounded(p, d + 32 * slab, staging, tile, warp_row, column + 64 * slab);
  }
  if constexpr (constexpr int WHOLE = COLUMNS / 64 * 64; WHOLE < COLUMNS) {
    StoreRounded<COLUMNS - WHOLE>(p, d + WHOLE / 2, staging, tile, warp_row, column + WHOLE);
  }
}

/// Return the factor of the accumulators of a matrix of weights.
__device__ __forceinline__ float WeightFactor(const GemmParams& p, const Tile& tile) {
  return p.weight_factors == nullptr ? 1.f : p.weight_factors[tile.weight_batch];
}

/// Return true if results of COLUMNS columns from `column` are plain bf16, without bias or factor, inside the matrix:
/// StoreWholeColumns() can store them.
template <int COLUMNS>
__device__ __forceinline__ bool AreWholeColumns(const GemmParams& p, int column) {
  return p.out == Element::kBFloat16 && p.bias == nullptr && p.weight_factors == nullptr && column + COLUMNS <= p.n;
}

/// Store as StoreRows what AreWholeColumns() accepts, in a fifth of the instructions: StoreRows waits for instructions
/// for a third of its time (ncu, H200, 4096 x 7168 x 4096 with block scales).
template <int COLUMNS>
__device__ __forceinline__ void StoreWholeColumns(const GemmParams& p, const float (&d)[COLUMNS / 2], uint32_t staging,
                                                  int column, const Tile& tile, int row) {
  const int lane = threadIdx.x % 32, first = row + int(threadIdx.x) % WARPGROUP / 32 * 16 + lane / 8;
  const uint32_t to = staging + hopper::Swizzle128(lane % 16 * hopper::SLAB_ROW_BYTES + lane / 16 * 16);
  const uint32_t from = staging + hopper::Swizzle128(lane / 8 * hopper::SLAB_ROW_BYTES + lane % 8 * 16);
  uint16_t* const line = RowOf<uint16_t>(p, tile, first) + column + 8 * (lane % 8);
#pragma unroll
  for (int slab = 0; slab < (COLUMNS + 63) / 64; ++slab) {
    const int width = COLUMNS - 64 * slab;  // columns from this slab on, less than 64 in a narrow last one
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16 && 4 * i < width; ++i) {
      words[i] = PackPair(d[32 * slab + 2 * i], d[32 * slab + 2 * i + 1], false);
    }
#pragma unroll
    for (int j = 0; j < 4 && 16 * j < width; ++j) {
      ptx::StoreMatrix4(to ^ (32 * j), words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
    }
    __syncwarp();
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ptx::LoadShared16((from ^ (i % 2 * 64)) + i * 4 * hopper::SLAB_ROW_BYTES);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 4 * i < tile.end_row && lane % 8 * 8 < width) {
        *reinterpret_cast<float4*>(line + 4 * i * p.d_stride + 64 * slab) = x[i];
      }
    }
  }
}

/// Store 64 rows of tokens by COLUMNS from (row, column), with StoreWholeColumns() where that is possible.
template <int COLUMNS>
__device__ __forceinline__ void StoreColumns(const GemmParams& p, float (&d)[COLUMNS / 2], float scale,
                                             uint32_t staging, int column, const Tile& tile, int row) {
  if (AreWholeColumns<COLUMNS>(p, column)) {
    if (scale != 1.f) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) d[i] *= scale;
    }
    StoreWholeColumns<COLUMNS>(p, d, staging, column, tile, row);
  } else if (column < p.n) {
    StoreRows<COLUMNS>(p, d, scale * WeightFactor(p, tile), staging, column, tile, row);
  }
}

/// Store 8 tokens from `row` by 64 columns: one fragment of accumulators with weights on the M side.
__device__ __forceinline__ void StoreTokens(const GemmParams& p, float (&d)[4], float scale, int column,
                                            const Tile& tile, int row) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int warp_column = column + int(threadIdx.x) % WARPGROUP / 32 * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = fmaf(d[i], scale, BiasOf(p, warp_column + lane / 4 + i / 2 * 8));
  if (p.out == Element::kFloat32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = row + 2 * quad + i % 2, c = warp_column + lane / 4 + i / 2 * 8;
      if (token < tile.end_row && c < p.n) RowOf<float>(p, tile, token)[c] = d[i];
    }
    return;
  }
  const bool is_half = p.out == Element::kFloat16;
  const uint32_t low = ptx::TransposeMatrix(PackPair(d[0], d[1], is_half));
  const uint32_t high = ptx::TransposeMatrix(PackPair(d[2], d[3], is_half));
  // Even lanes collect four of the lower eight weights, odd lanes four of the upper eight.
  const uint32_t other = __shfl_xor_sync(~0u, quad % 2 ? low : high, 1);
  const uint32_t words[2] = {quad % 2 ? other : low, quad % 2 ? high : other};
  const int token = row + lane / 4;
  if (token < tile.end_row) {
    StoreWords(p, RowOf<uint16_t>(p, tile, token), warp_column + quad % 2 * 8 + quad / 2 * 4, words);
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
