// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/math.cuh: exact instead of approximate.
#pragma once

namespace flashinfer {
namespace ptx {

/// Flush subnormal results to zero.
inline float Flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float Exp2(float x) { return Flush(exp2f(Flush(x))); }
inline float After(float x, float y) { return std::fma(y, 0.f, x); }
inline float AddHere(float x, float y) { return Flush(x + y); }
inline float Reciprocal(float x) { return Flush(1.f / Flush(x)); }
inline float Relu(float x) { return x < 0.f ? 0.f : x; }
inline uint32_t AndXor(uint32_t x, uint32_t mask, uint32_t y) { return (x & mask) ^ y; }
inline float Tanh(float x) { return tanhf(x); }
inline uint32_t HalvesOf(uint16_t x, __nv_fp8_interpretation_t type) {
  const __half2_raw y = __nv_cvt_fp8x2_to_halfraw2(x, type);
  return y.x | uint32_t(y.y) << 16;
}
inline uint32_t HalvesOfE4M3(uint16_t x) { return HalvesOf(x, __NV_E4M3); }
inline uint32_t HalvesOfE5M2(uint16_t x) { return HalvesOf(x, __NV_E5M2); }
/// Apply f to the numbers of two pairs of bf16, and round.
template <typename F>
uint32_t Bf16Pairs(uint32_t x, uint32_t y, const F& f) {
  uint32_t z = 0;
  for (int i = 0; i < 2; ++i) {
    const __nv_bfloat16_raw a = {uint16_t(x >> 16 * i)}, b = {uint16_t(y >> 16 * i)};
    const __nv_bfloat16 rounded = __float2bfloat16_rn(f(__bfloat162float(a), __bfloat162float(b)));
    z |= uint32_t(static_cast<__nv_bfloat16_raw>(rounded).x) << 16 * i;
  }
  return z;
}
inline uint32_t MultiplyBf16Pairs(uint32_t x, uint32_t y) {
  return Bf16Pairs(x, y, [](float a, float b) { return a * b; });
}
inline uint32_t SubtractBf16Pairs(uint32_t x, uint32_t y) {
  return Bf16Pairs(x, y, [](float a, float b) { return a - b; });
}

}  // namespace ptx
}  // namespace flashinfer
