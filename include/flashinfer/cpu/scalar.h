// SPDX-License-Identifier: Apache-2.0
// Storage types of the CPU kernels: IEEE half, bfloat16 and the two fp8 formats. Arithmetic is always done in float.
// Encode and Decode are written without branches over F (float, or a vector of floats) and U (uint32_t, or as many of
// them), so that one number and a SIMD register take the same path and cannot disagree.
//   test  pytest tests/norm/test_cpu_scalar.py
#pragma once
#include <cstdint>
#include <cstring>

namespace flashinfer {
namespace cpu {

template <typename To, typename From>
inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

constexpr uint32_t FLOAT_INF_BITS = 0x7F800000;

// A format has MANTISSA explicit bits and exponent bias BIAS. In the float bits of a magnitude:
//   LIMIT    larger magnitudes are replaced by this one: what rounds to infinity, or the largest fp8 (saturation)
// and in its own bits without the sign:
//   SPECIAL  the first pattern that is no finite number      QUIET_NAN  the pattern written for any NaN
struct HalfFormat {
  using Storage = uint16_t;
  static constexpr int MANTISSA = 10, BIAS = 15;
  static constexpr uint32_t LIMIT = 0x47800000, SPECIAL = 0x7C00, QUIET_NAN = 0x7E00;  // limit 65536
};
struct BrainFormat {  // the upper half of a float, so nothing is special about its exponents
  using Storage = uint16_t;
  static constexpr int MANTISSA = 7, BIAS = 127;
  static constexpr uint32_t QUIET_NAN = 0x7FC0;
};
struct E4M3Format {  // the "fn" variant: no infinity, one NaN per sign
  using Storage = uint8_t;
  static constexpr int MANTISSA = 3, BIAS = 7;
  static constexpr uint32_t LIMIT = 0x43E00000, SPECIAL = 0x7F, QUIET_NAN = 0x7F;  // limit 448
};
struct E5M2Format {
  using Storage = uint8_t;
  static constexpr int MANTISSA = 2, BIAS = 15;
  static constexpr uint32_t LIMIT = 0x47600000, SPECIAL = 0x7C, QUIET_NAN = 0x7F;  // limit 57344
};

/// Return 2^EXPONENT, exactly.
template <int EXPONENT>
inline float PowerOfTwo() {
  static_assert(EXPONENT > -127 && EXPONENT < 128, "a normal float");
  return BitCast<float>(uint32_t{EXPONENT + 127} << 23);
}

/// Return the bits of x in Format, rounded to nearest even. A magnitude above the limit becomes the limit; NaN stays
/// NaN.
template <typename Format, typename U, typename F>
inline U Encode(const F& x) {
  constexpr int SHIFT = 23 - Format::MANTISSA;
  constexpr uint32_t HALF_UNIT = 1u << (SHIFT - 1);
  const U bits = BitCast<U>(x);
  U result;
  if constexpr (Format::BIAS == 127) {  // the sign may stay where it is, and overflow carries into infinity
    result = (bits + ((bits >> SHIFT) & 1) + (HALF_UNIT - 1)) >> SHIFT;
  } else {
    constexpr int SIGN_SHIFT = 32 - 8 * sizeof(typename Format::Storage);
    constexpr uint32_t MIN_NORMAL = uint32_t{128 - Format::BIAS} << 23;
    U magnitude = bits & 0x7FFFFFFFu;
    magnitude = magnitude < Format::LIMIT ? magnitude : U{} + Format::LIMIT;
    // Half a unit (less one for an even mantissa) carries into the kept bits; then the exponent is re-based.
    result = (magnitude + ((magnitude >> SHIFT) & 1) + (HALF_UNIT - 1)) >> SHIFT;
    result -= uint32_t{127 - Format::BIAS} << Format::MANTISSA;
    // Below the smallest normal number the unit is fixed. A float whose own last bit is that unit lets the adder round.
    const F magic = F{} + PowerOfTwo<1 - Format::BIAS - Format::MANTISSA + 23>();
    const U subnormal = BitCast<U>(BitCast<F>(magnitude) + magic) - BitCast<U>(magic);
    result = magnitude < MIN_NORMAL ? subnormal : result;
    result |= (bits & 0x80000000u) >> SIGN_SHIFT;
  }
  return x == x ? result : U{} + Format::QUIET_NAN;
}

/// Return the float whose bits in Format are given; exact. `to_float` converts an integer (each lane of a vector) by
/// value.
template <typename Format, typename F, typename U, typename ToFloat>
inline F Decode(const U& bits, ToFloat to_float) {
  constexpr int SHIFT = 23 - Format::MANTISSA;
  if constexpr (Format::BIAS == 127) {
    return BitCast<F>(bits << SHIFT);
  } else {
    constexpr int SIGN_SHIFT = 32 - 8 * sizeof(typename Format::Storage);
    const U magnitude = bits & (0x7FFFFFFFu >> SIGN_SHIFT);
    const U shifted = magnitude << SHIFT;
    // The unit below the smallest normal number is 2^(1 - BIAS - MANTISSA).
    const F subnormal = to_float(magnitude) * PowerOfTwo<1 - Format::BIAS - Format::MANTISSA>();
    U result = shifted + (uint32_t{127 - Format::BIAS} << 23);
    result = magnitude < (1u << Format::MANTISSA) ? BitCast<U>(subnormal) : result;
    result = magnitude < Format::SPECIAL ? result : (shifted | FLOAT_INF_BITS);
    return BitCast<F>(result | ((bits << SIGN_SHIFT) & 0x80000000u));
  }
}

/// Number stored in 8 or 16 bits. Conversions are explicit, so that every rounding is visible in the code.
template <typename FormatT>
struct SmallFloat {
  using Format = FormatT;
  typename Format::Storage bits;

  SmallFloat() = default;
  explicit SmallFloat(float x) : bits(static_cast<typename Format::Storage>(Encode<Format, uint32_t>(x))) {}
  explicit operator float() const {
    return Decode<Format, float>(uint32_t{bits}, [](uint32_t value) { return static_cast<float>(value); });
  }
};

using float16 = SmallFloat<HalfFormat>;
using bfloat16 = SmallFloat<BrainFormat>;
using float8_e4m3 = SmallFloat<E4M3Format>;
using float8_e5m2 = SmallFloat<E5M2Format>;

}  // namespace cpu
}  // namespace flashinfer
