// SPDX-License-Identifier: Apache-2.0
// Reductions and prefix sums over the 32 lanes of a warp.
#pragma once
#include <cstdint>

namespace flashinfer {

constexpr uint32_t ALL_LANES = 0xffffffffu;

/// Return the sum over the warp, in every lane.
template <typename T>
__device__ __forceinline__ T WarpSum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}

/// Return the maximum over the warp, in every lane.
__device__ __forceinline__ int WarpMax(int x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}

/// Return the inclusive prefix sum over the lanes.
template <typename T>
__device__ __forceinline__ T WarpInclusiveScan(T x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T below = __shfl_up_sync(ALL_LANES, x, offset);
    if (int(threadIdx.x % 32) >= offset) x += below;
  }
  return x;
}

}  // namespace flashinfer
