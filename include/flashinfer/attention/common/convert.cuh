// SPDX-License-Identifier: Apache-2.0
// Conversions in registers: pairs of 16-bit floats, and fp8 and NVFP4 to 16 bits.
#pragma once
#include <type_traits>

#include "../../vec_dtypes.cuh"
#include "backend_interface.h"

namespace flashinfer {
namespace attention {

template <typename T>
inline constexpr bool IS_FP4 = std::is_same_v<T, uint8_t>;
template <typename T>
inline constexpr bool IS_FP8 = sizeof(T) == 1 && !IS_FP4<T>;

/// Pack two 16-bit floats into a register.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t Pack<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t Pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t x);
template <>
__device__ __forceinline__ float2 Unpack<__half>(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(uint32_t x) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}

/// Constants of the fp8 conversion: the bits move under the wider exponent, followed by one exact multiplication by a
/// power of two, subnormal numbers included. 9 instructions for 4 numbers, whereas the conversion instructions go
/// through float. `x` holds 4 numbers; `odd` gets those of bytes 1 and 3, `even` those of bytes 0 and 2.
template <typename To, typename From>
struct Fp8Bits;
template <>
struct Fp8Bits<__nv_bfloat16, __nv_fp8_e4m3> {
  static constexpr int SHIFT = 4;
  static constexpr uint32_t MASK = 0x07f007f0, FACTOR = 0x7b807b80;  // 2^120
};
template <>
struct Fp8Bits<__nv_bfloat16, __nv_fp8_e5m2> {
  static constexpr int SHIFT = 3;
  static constexpr uint32_t MASK = 0x0fe00fe0, FACTOR = 0x77807780;  // 2^112
};
template <>
struct Fp8Bits<__half, __nv_fp8_e4m3> {
  static constexpr int SHIFT = 1;
  static constexpr uint32_t MASK = 0x3f803f80, FACTOR = 0x5c005c00;  // 2^8
};
template <>
struct Fp8Bits<__half, __nv_fp8_e5m2> {
  static constexpr int SHIFT = 0;
  static constexpr uint32_t MASK = 0x7f007f00, FACTOR = 0;
};

template <typename To>
__device__ __forceinline__ uint32_t Multiply2(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t Multiply2<__half>(uint32_t a, uint32_t b) {
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t Multiply2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 x =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename To, typename From>
__device__ __forceinline__ void ExpandFp8(uint32_t x, uint32_t& even, uint32_t& odd) {
  using Bits = Fp8Bits<To, From>;
  const uint32_t moved = x << 8;
  odd = ((x >> Bits::SHIFT) & Bits::MASK) | (x & 0x80008000u);
  even = ((moved >> Bits::SHIFT) & Bits::MASK) | (moved & 0x80008000u);
  if constexpr (Bits::FACTOR != 0) {
    odd = Multiply2<To>(odd, Bits::FACTOR);
    even = Multiply2<To>(even, Bits::FACTOR);
  }
}

/// Convert 4 fp8 numbers to fp16, which holds them exactly: `low` from bytes 0 and 1, `high` from bytes 2 and 3.
template <typename From>
__device__ __forceinline__ void HalvesOf(uint32_t x, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint16_t first = uint16_t(x), second = uint16_t(x >> 16);
  if constexpr (std::is_same_v<From, __nv_fp8_e4m3>) {
    low = ptx::HalvesOfE4M3(first);
    high = ptx::HalvesOfE4M3(second);
  } else {
    low = ptx::HalvesOfE5M2(first);
    high = ptx::HalvesOfE5M2(second);
  }
#else
  uint32_t even, odd;
  ExpandFp8<__half, From>(x, even, odd);
  low = __byte_perm(even, odd, 0x5410);
  high = __byte_perm(even, odd, 0x7632);
#endif
}

/// Convert 8 numbers of an NVFP4 row: E2M1 codes, low nibble first, times their e4m3 scale.
template <typename T>
__device__ __forceinline__ uint4 ExpandFp4(uint32_t codes, uint8_t scale_bits) {
  __nv_fp8_e4m3 scale_storage;
  scale_storage.__x = scale_bits;
  const float scale = float(scale_storage);
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t code = codes >> (8 * i + 4 * j);
      // E2M1: 1 mantissa bit; exponent 0 is subnormal (0, 0.5). As float bits: exponent + 126, mantissa on top.
      const uint32_t magnitude = code & 7;
      const float x = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((126u << 23) + (magnitude << 22));
      value[j] = (code & 8) != 0 ? -x * scale : x * scale;
    }
    out[i] = Pack<T>(value[0], value[1]);
  }
  return uint4{out[0], out[1], out[2], out[3]};
}

}  // namespace attention
}  // namespace flashinfer
