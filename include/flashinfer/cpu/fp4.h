// SPDX-License-Identifier: Apache-2.0
// Four-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) and the formats of their block scales.
// Two codes share a byte, the even element in the low nibble.
#pragma once
#include <cstdint>
#include <cstring>

#include "scalar.h"
#include "vec.h"

namespace flashinfer {
namespace cpu {

/// e2m1 in one byte: the sign in bit 7, the three magnitude bits in bits 0 to 2.
struct E2M1Format {
  using Storage = uint8_t;
  static constexpr int MANTISSA = 1, BIAS = 1;
  static constexpr uint32_t LIMIT = 0x40C00000, SPECIAL = 8, QUIET_NAN = 0;  // limit 6; every code is a number
};

typedef uint64_t WideVec __attribute__((vector_size(VEC_BYTES)));

/// Load LANES values from LANES / 2 bytes.
inline Vec LoadE2M1(const uint8_t* from) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, from, LANES / 2);
  WideVec shifts;
  for (int i = 0; i < LANES / 2; ++i) shifts[i] = 8 * i;  // folded to a constant
  WideVec lanes = (WideVec{} + bytes) >> shifts;
  // A byte becomes two 32-bit lanes, in each the magnitude at the bottom and the sign in bit 7.
  lanes = (lanes & 0x07) | ((lanes & 0x08) << 4) | ((lanes & 0x70) << 28) | ((lanes & 0x80) << 32);
  return DecodeLanes<E2M1Format>(reinterpret_cast<UintVec>(lanes));
}

/// Return one value. `index` counts codes, two per byte.
inline float DecodeE2M1(const uint8_t* bytes, int64_t index) {
  const uint32_t code = (bytes[index / 2] >> (index % 2 * 4)) & 0xF;
  return Decode<E2M1Format, float>((code & 7) | ((code & 8) << 4), [](uint32_t x) { return static_cast<float>(x); });
}

inline float DecodeE4M3(uint8_t byte) {
  return Decode<E4M3Format, float>(uint32_t{byte}, [](uint32_t x) { return static_cast<float>(x); });
}

/// Return 2^(byte - 127), or NaN for 255.
inline float DecodeE8M0(uint8_t byte) {
  if (byte == 255) return BitCast<float>(uint32_t{0x7FC00000});
  return BitCast<float>(byte == 0 ? uint32_t{0x00400000} : uint32_t{byte} << 23);
}

}  // namespace cpu
}  // namespace flashinfer
