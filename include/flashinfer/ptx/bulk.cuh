// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous bytes (PTX ISA: Data Movement, "cp.async.bulk"), SM90 and later, besides LoadBulk of tma.cuh.
// Addresses and sizes are multiples of 16 bytes. A load signals its bytes to an mbarrier; stores are in the groups of
// tma.cuh (CommitStores, WaitStoresRead). One thread issues each copy.
#pragma once
#include <cstdint>

#include "tma.cuh"

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Store bytes from shared memory.
__device__ __forceinline__ void StoreBulk(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

#endif

}  // namespace ptx
}  // namespace flashinfer
