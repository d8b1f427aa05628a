// SPDX-License-Identifier: Apache-2.0
// Atomic operations that order memory (PTX ISA: Parallel Synchronization, "atom").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// *address += x; returns what was there. Of two that add to one address, the later sees all that was written before the
/// earlier, by its thread or by threads it had met at a barrier. (A fence on either side costs 0.4 us more on an H200.)
__device__ __forceinline__ int32_t AddOrdered(int32_t* address, int32_t x) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(x) : "memory");
  return before;
}

}  // namespace ptx
}  // namespace flashinfer
