// SPDX-License-Identifier: Apache-2.0
// Reductions of a number over all lanes of a warp (PTX ISA: "redux.sync"). Implemented with shuffles before SM80.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

template <typename F>
__device__ __forceinline__ uint32_t ReduceByShuffles(uint32_t x, const F& f) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

__device__ __forceinline__ uint32_t ReduceMin(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xffffffffu, x);
#else
  return ReduceByShuffles(x, [](uint32_t a, uint32_t b) { return min(a, b); });
#endif
}

__device__ __forceinline__ uint32_t ReduceMax(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  return ReduceByShuffles(x, [](uint32_t a, uint32_t b) { return max(a, b); });
#endif
}

__device__ __forceinline__ uint32_t ReduceAdd(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, x);
#else
  return ReduceByShuffles(x, [](uint32_t a, uint32_t b) { return a + b; });
#endif
}

}  // namespace ptx
}  // namespace flashinfer
