// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding of states, the same on both devices: random words by position, and conversions that use their bits.
// A word is Philox-4x32 of key `seed` and counter (offset, 0, 0), so that it belongs to an element of the state and not to a
// thread: rounding does not depend on the launch.
//   test  pytest tests/recurrent/test_mamba_update.py
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../host_device.h"

namespace flashinfer {
namespace recurrent {

FLASHINFER_HD uint32_t FloatBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

/// Advance the counter `c` by one round of Philox with key `k`.
FLASHINFER_HD void PhiloxRound(uint32_t (&c)[4], uint32_t (&k)[2]) {
  const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
  c[0] = uint32_t(b >> 32) ^ c[1] ^ k[0];
  c[2] = uint32_t(a >> 32) ^ c[3] ^ k[1];
  c[1] = uint32_t(b);
  c[3] = uint32_t(a);
  k[0] += 0x9E3779B9u;
  k[1] += 0xBB67AE85u;
}

struct PhiloxStart {
  uint32_t c[4], k[2];
  FLASHINFER_HD PhiloxStart(int64_t seed, int64_t offset)
      : c{uint32_t(offset), uint32_t(uint64_t(offset) >> 32), 0, 0},
        k{uint32_t(seed), uint32_t(uint64_t(seed) >> 32)} {}
};

/// Return the first word of `rounds` rounds.
FLASHINFER_HD uint32_t RandomWord(int64_t seed, int64_t offset, int rounds) {
  PhiloxStart at(seed, offset);
  if (rounds == 10) {  // the usual number: without a loop
#pragma unroll
    for (int i = 0; i < 10; ++i) PhiloxRound(at.c, at.k);
  } else {
    for (int i = 0; i < rounds; ++i) PhiloxRound(at.c, at.k);
  }
  return at.c[0];
}

/// Bits of the half to which x rounds by the 13 low bits of `random`: they are added below the mantissa that stays, the rest
/// is cut off. Below 2^-14 the result is 0, above the range infinity; NaN stays NaN.
FLASHINFER_HD uint16_t RoundToHalf(float x, uint32_t random) {
  const uint32_t bits = FloatBits(x), sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7fffu);
  magnitude += random & 0x1fffu;
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // 2^16 and infinity
  if (magnitude < 0x38800000u) return uint16_t(sign);             // 2^-14
  return uint16_t(sign | ((magnitude >> 13) - (112u << 10)));
}

/// Bits of the e4m3 number to which x rounds by the 16 low bits of `random`, which are added at the top of the mantissa bits
/// that are cut off. Saturates to 448; NaN stays NaN.
FLASHINFER_HD uint8_t RoundToE4M3(float x, uint32_t random) {
  const uint32_t bits = FloatBits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7eu);  // 448 and more
  const int exponent = int(magnitude >> 23) - 127;
  const int low = exponent < -6 ? -6 - exponent : 0;  // further bits that a subnormal number loses
  const int cut = 20 + low;
  if (cut > 40) return uint8_t(sign);  // below 2^-26, where 2^-16 of the smallest step rounds up less than once in 2^16
  const uint64_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t steps = uint32_t((significand + (uint64_t(random & 0xffffu) << (cut - 16))) >> cut);
  const uint32_t code = low > 0 ? steps : (uint32_t(exponent + 7) << 3) + (steps - 8);
  return uint8_t(sign | (code > 0x7eu ? 0x7eu : code));
}

/// The integer to which x rounds by the 24 low bits of `random`: floor(x + u), u uniform in [0, 1).
FLASHINFER_HD float RoundToInteger(float x, uint32_t random) {
  return floorf(x + float(random & 0xffffffu) * 5.9604644775390625e-8f);
}

}  // namespace recurrent
}  // namespace flashinfer
