// SPDX-License-Identifier: Apache-2.0
// Prefetches (PTX ISA: Data Movement, "prefetch", "cp.async.bulk.prefetch.L2").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Prefetch the cache line of an address into L2. The call does not wait, and an invalid address is ignored.
__device__ __forceinline__ void PrefetchL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// Prefetch `bytes` from an address into L2, both multiples of 16. No-op before SM90.
__device__ __forceinline__ void PrefetchL2(const void* address, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

}  // namespace ptx
}  // namespace flashinfer
