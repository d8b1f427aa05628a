// SPDX-License-Identifier: Apache-2.0
// Choice of one lane of a warp (PTX ISA: Parallel Synchronization, "elect.sync"), SM90 and later.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Return true in one lane, the same one in each call. Called by all lanes of a warp. The compiler knows that what depends
/// on the result runs in one lane: copies by TMA there need no loop over lanes, as after `if (lane == 0)`.
__device__ __forceinline__ bool ElectLane() {
  uint32_t is_elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

#endif

}  // namespace ptx
}  // namespace flashinfer
