// SPDX-License-Identifier: Apache-2.0
// Global loads and stores with cache hints (PTX ISA: Data Movement, "ld", "st").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// 16 bytes that nobody reads again soon: kept out of L1, so that weights stay there. Not `.nc`: the kernel may write
/// the same buffer later, and under programmatic dependent launch the data may be younger than the grid.
__device__ __forceinline__ uint4 LoadStream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

}  // namespace ptx
}  // namespace flashinfer
