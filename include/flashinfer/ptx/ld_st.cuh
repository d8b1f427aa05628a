// SPDX-License-Identifier: Apache-2.0
// Global loads and stores with cache hints (PTX ISA: Data Movement, "ld", "st").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// L2 policy of data that is read once: the first to go when room is needed.
__device__ __forceinline__ uint64_t EvictFirst() {
  uint64_t policy = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

/// 16 bytes that this grid reads once: kept out of L1, so that weights stay there, and first to leave L2. Not `.nc`: the
/// kernel may write the same buffer later, and under programmatic dependent launch the data may be younger than the grid.
__device__ __forceinline__ uint4 LoadOnce(const uint4* p, uint64_t policy) {
  uint4 v;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
#else
  v = *p;
#endif
  return v;
}

/// Bring the line of `p` into L1 without a register for it.
__device__ __forceinline__ void PrefetchL1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

}  // namespace ptx
}  // namespace flashinfer
