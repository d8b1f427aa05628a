// SPDX-License-Identifier: Apache-2.0
// Rounding to e4m3 (PTX ISA: Data Movement and Conversion Instructions, "cvt", SM89 and later), and the largest of three
// integers (a DPX instruction of SM90). Numbers beyond 448 become 448.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Two numbers as e4m3, the first in the low byte.
__device__ __forceinline__ uint16_t E4m3Pair(float a, float b) {
  uint16_t x;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(x) : "f"(a), "f"(b));
  return x;
}

/// Two numbers as e4m3 in the low half, below a pair. Written as one statement it is one instruction.
__device__ __forceinline__ uint32_t E4m3Pairs(float a, float b, uint16_t high) {
  uint32_t x;
  asm("{\n.reg .b16 low;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "mov.b32 %0, {low, %3};\n}"
      : "=r"(x)
      : "f"(a), "f"(b), "h"(high));
  return x;
}

/// Largest of three integers.
__device__ __forceinline__ int Max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }

#endif

}  // namespace ptx
}  // namespace flashinfer
