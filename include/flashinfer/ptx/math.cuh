// SPDX-License-Identifier: Apache-2.0
// Special functions of the hardware (PTX ISA: Floating Point Instructions, "ex2", "rcp" and "tanh"), and arithmetic of pairs
// of bf16. With .ftz each is a single instruction; the intrinsics __expf and __fdividef wrap theirs in tests and scalings
// for subnormal numbers.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return 2^x to 2 ulp. Results below 2^-126 are 0, results above the range are infinite; NaN stays NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Return x, once y (which must be finite) is known: what is computed from x is not scheduled before y.
__device__ __forceinline__ float After(float x, float y) {
  float z;
  asm("fma.rn.ftz.f32 %0, %1, 0f00000000, %2;" : "=f"(z) : "f"(y), "f"(x));
  return z;
}

/// Return x + y, computed here: compilers move it past no other volatile statement.
__device__ __forceinline__ float AddHere(float x, float y) {
  float z;
  asm volatile("add.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// Return 1 / x to 1 ulp. The reciprocal of infinity is 0, and so are results below 2^-126.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Return max(x, 0), or NaN for NaN, which fmaxf() turns into 0 (PTX ISA: "max"; one instruction from SM80 on).
__device__ __forceinline__ float Relu(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < 0.f ? 0.f : x;
#endif
}

/// Convert two e4m3 or e5m2 numbers to __half2, exactly (PTX ISA: "cvt", SM89 and later).
__device__ __forceinline__ uint32_t HalvesOfE4M3(uint16_t x) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ uint32_t HalvesOfE5M2(uint16_t x) {
  uint32_t y;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}

/// Multiply or subtract pairs of bf16 (PTX ISA: Half Precision Floating Point Instructions, SM90 and later). Rounded to
/// nearest; subnormal numbers are kept.
__device__ __forceinline__ uint32_t MultiplyBf16Pairs(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
__device__ __forceinline__ uint32_t SubtractBf16Pairs(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

/// Return (x & mask) ^ y, as one instruction ("lop3").
__device__ __forceinline__ uint32_t AndXor(uint32_t x, uint32_t mask, uint32_t y) {
  uint32_t z;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(z) : "r"(x), "r"(mask), "r"(y));
  return z;
}

/// Return tanh(x) to a relative error of 2^-11.
__device__ __forceinline__ float Tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
}  // namespace flashinfer
