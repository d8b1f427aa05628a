// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding for kernels of users, under the published path and names. The implementation is
// ../recurrent/round.h; results are the same on every GPU, whether or not the chip has an instruction for it.
//   test  pytest tests/recurrent/test_emulated_conversion.py
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../recurrent/round.h"

namespace flashinfer {
namespace mamba {
namespace conversion {

/// Return the first word of Philox-4x32 with N rounds, key `seed` and counter (`offset`, 0, 0).
template <int N>
__device__ __forceinline__ uint32_t philox_randint(int64_t seed, int64_t offset) {
  recurrent::PhiloxStart at(seed, offset);
#pragma unroll
  for (int i = 0; i < N; ++i) recurrent::PhiloxRound(at.c, at.k);
  return at.c[0];
}

/// Return all four words.
template <int N>
__device__ __forceinline__ void philox_randint4x(int64_t seed, int64_t offset, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                 uint32_t& r3) {
  recurrent::PhiloxStart at(seed, offset);
#pragma unroll
  for (int i = 0; i < N; ++i) recurrent::PhiloxRound(at.c, at.k);
  r0 = at.c[0], r1 = at.c[1], r2 = at.c[2], r3 = at.c[3];
}

/// Round to half by 13 random bits.
__device__ __forceinline__ __half cvt_rs_f16_f32(float x, uint32_t rand13) {
  return __ushort_as_half(recurrent::RoundToHalf(x, rand13));
}

/// Round two floats to half: `a`, by bits 12:0, into the low 16 bits, `b`, by bits 28:16, into the high ones.
__device__ __forceinline__ uint32_t cvt_rs_f16x2_f32(float a, float b, uint32_t rbits) {
  return uint32_t(recurrent::RoundToHalf(a, rbits)) | uint32_t(recurrent::RoundToHalf(b, rbits >> 16)) << 16;
}

/// Round four floats to e4m3, the first into byte 0: by bits 15:0, these reversed, bits 31:16, and those reversed.
__device__ __forceinline__ uint32_t cvt_rs_e4m3x4_f32(float a, float b, float c, float d, uint32_t rbits) {
  const uint32_t reversed = __brev(rbits);  // bits 31:16 are the reversal of bits 15:0
  return uint32_t(recurrent::RoundToE4M3(a, rbits)) | uint32_t(recurrent::RoundToE4M3(b, reversed >> 16)) << 8 |
         uint32_t(recurrent::RoundToE4M3(c, rbits >> 16)) << 16 | uint32_t(recurrent::RoundToE4M3(d, reversed)) << 24;
}

}  // namespace conversion
}  // namespace mamba
}  // namespace flashinfer
