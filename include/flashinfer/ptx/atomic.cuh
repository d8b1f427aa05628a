// SPDX-License-Identifier: Apache-2.0
// Atomic operations that order memory (PTX ISA: Parallel Synchronization, "atom").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Add x to *address and return the old value, with acquire and release order: a thread that adds later sees all writes
/// that preceded an earlier addition, by the adding thread or by threads it had synchronised with at a barrier. (A
/// fence before and after a relaxed addition costs 0.4 us more on an H200.)
__device__ __forceinline__ int32_t AddOrdered(int32_t* address, int32_t x) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(x) : "memory");
  return before;
}

/// Load with acquire order: what preceded the StoreRelease or AddOrdered whose value is read is visible afterwards.
__device__ __forceinline__ int32_t LoadAcquire(const int32_t* address) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

/// Store with release order.
__device__ __forceinline__ void StoreRelease(int32_t* address, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace ptx
}  // namespace flashinfer
