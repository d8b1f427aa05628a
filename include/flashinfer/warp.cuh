// SPDX-License-Identifier: Apache-2.0
// Numbers of the 32 lanes of a warp, combined by all of them.
#pragma once
#include <cstdint>

namespace flashinfer {

constexpr uint32_t ALL_LANES = 0xffffffffu;

/// The sum, to every lane.
template <typename T>
__device__ __forceinline__ T WarpSum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}

/// The largest, to every lane.
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

/// The sum of the lanes up to this one.
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
