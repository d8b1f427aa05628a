// SPDX-License-Identifier: Apache-2.0
// Inverse of a unit lower triangular matrix of 64 x 64 floats in shared memory, in place, by four warps.
//
// Each warp inverts a diagonal block of 16 by forward substitution, a column per lane. Then two levels of
// -T22 (A21 T11) fill the blocks below, of 16 x 16 and 32 x 32, on the tensor cores: products of TF32, or of pairs of TF32
// whose sum has 22 bits (EXACT, for fp16: its tolerances are below the 11 bits of one).
#pragma once
#include "../../ptx/mma.cuh"
#include "params.h"

namespace flashinfer {
namespace recurrent {

constexpr int MATRIX_STRIDE = CHUNK + 4;  // floats of a row: neighbouring rows lie in different banks
constexpr int MATRIX_FLOATS = CHUNK * MATRIX_STRIDE;

/// c += a b, for m16n8k8. The steps of K may be in any order, the same for a and b. One TF32 is the float cut off.
template <bool EXACT>
__device__ __forceinline__ void MultiplyTf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                                             float b1) {
  const float a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  uint32_t a_high[4], b_high[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a_high[i] = EXACT ? ptx::ToTf32(a[i]) : __float_as_uint(a[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) b_high[i] = EXACT ? ptx::ToTf32(b[i]) : __float_as_uint(b[i]);
  if constexpr (EXACT) {
    uint32_t a_low[4], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a_low[i] = ptx::ToTf32(a[i] - __uint_as_float(a_high[i]));
#pragma unroll
    for (int i = 0; i < 2; ++i) b_low[i] = ptx::ToTf32(b[i] - __uint_as_float(b_high[i]));
    ptx::MmaTf32(c, a_low, b_high[0], b_high[1]);
    ptx::MmaTf32(c, a_high, b_low[0], b_low[1]);
  }
  ptx::MmaTf32(c, a_high, b_high[0], b_high[1]);
}

/// Invert the diagonal block of 16 x 16 of this warp, the lower and upper 16 lanes in matrices of their own if they are
/// given two. Entries on and above the diagonal are not read.
__device__ __forceinline__ void InvertDiagonal(float* m, int warp, bool stores) {
  const int column = threadIdx.x % 16;
  float* const block = m + warp * 16 * (MATRIX_STRIDE + 1);
  float t[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(block + i * MATRIX_STRIDE + j);
      sum = fmaf(-a.x, t[j], sum);
      if (j + 1 < i) sum = fmaf(-a.y, t[j + 1], sum);
      if (j + 2 < i) sum = fmaf(-a.z, t[j + 2], sum);
      if (j + 3 < i) sum = fmaf(-a.w, t[j + 3], sum);
    }
    t[i] = sum;
  }
  __syncwarp();
  if (stores) {
#pragma unroll
    for (int i = 0; i < 16; ++i) block[i * MATRIX_STRIDE + column] = t[i];
  }
}

/// Compute rows [row, row + 16) of -L A R for the tiles of 8 columns [first, first + COUNT) of a block whose first column
/// is `column`: L are columns [left, left + 8 steps) of these rows, A the WIDTH columns below R, which is on the diagonal.
template <bool EXACT, int WIDTH, int COUNT>
__device__ __forceinline__ void MultiplyBlocks(float (&out)[COUNT][4], const float* m, int row, int left, int steps,
                                               int column, int first) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = 2 * (lane % 4);
  float product[WIDTH / 8][4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if (step >= steps) break;
    const float* const a = m + (row + r) * MATRIX_STRIDE + left + 8 * step + c;
    const float* const b = m + (left + 8 * step + c) * MATRIX_STRIDE + column + r;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
      MultiplyTf32<EXACT>(product[n], a[0], a[8 * MATRIX_STRIDE], a[1], a[8 * MATRIX_STRIDE + 1], b[8 * n],
                          b[8 * n + MATRIX_STRIDE]);
    }
  }
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0.f;
#pragma unroll
    for (int step = 0; step < WIDTH / 8; ++step) {
      if (step < first + n) continue;  // above the diagonal
      const float* const b = m + (column + 8 * step + c) * MATRIX_STRIDE + column + 8 * (first + n) + r;
      const float (&a)[4] = product[step];
      MultiplyTf32<EXACT>(out[n], a[0], a[2], a[1], a[3], b[0], b[MATRIX_STRIDE]);
    }
  }
}

/// Store what MultiplyBlocks computed, negated.
template <int COUNT>
__device__ __forceinline__ void StoreBlocks(float* m, const float (&out)[COUNT][4], int row, int column, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    float* const to = m + (row + lane / 4) * MATRIX_STRIDE + column + 8 * (first + n) + 2 * (lane % 4);
    *reinterpret_cast<float2*>(to) = {-out[n][0], -out[n][1]};
    *reinterpret_cast<float2*>(to + 8 * MATRIX_STRIDE) = {-out[n][2], -out[n][3]};
  }
}

/// Replace the strictly lower part A of each of HEADS matrices, one after another, by the lower triangle of (I + A)^-1.
/// Blocks above the diagonal blocks of 16 are not written. Called by 128 threads, for which `sync` is a
/// barrier, after one; another must follow.
template <bool EXACT, int HEADS, typename Sync>
__device__ __forceinline__ void InvertUnitLower(float* matrices, const Sync& sync) {
  constexpr int TILES = HEADS;  // a warp computes a half of a block of one matrix, or a whole block of one of two
  const int warp = threadIdx.x / 32 % 4, block = HEADS == 1 ? warp / 2 : warp % 2, half = HEADS == 1 ? warp % 2 : 0;
  const int lane_matrix = HEADS == 1 ? 0 : int(threadIdx.x) % 32 / 16;
  InvertDiagonal(matrices + lane_matrix * MATRIX_FLOATS, warp, HEADS == 2 || threadIdx.x % 32 < 16);
  sync();
  float* const m = matrices + (HEADS == 1 ? 0 : warp / 2) * MATRIX_FLOATS;
  {
    float out[TILES][4];
    MultiplyBlocks<EXACT, 16, TILES>(out, m, 32 * block + 16, 32 * block + 16, 2, 32 * block, half);
    sync();
    StoreBlocks(m, out, 32 * block + 16, 32 * block, half);
  }
  sync();
  float out[2 * TILES][4];
  MultiplyBlocks<EXACT, 32, 2 * TILES>(out, m, 32 + 16 * block, 32, 2 * (block + 1), 0, 2 * half);
  sync();
  StoreBlocks(m, out, 32 + 16 * block, 0, 2 * half);
}

}  // namespace recurrent
}  // namespace flashinfer
