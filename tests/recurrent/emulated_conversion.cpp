// SPDX-License-Identifier: Apache-2.0
// The published rounding helpers of test_emulated_conversion.py, over arrays.
#include <cstdint>

/// Reversal of the bits of a word, as the device has it.
inline uint32_t __brev(uint32_t x) {  // NOLINT(bugprone-reserved-identifier)
  uint32_t y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}

#include <flashinfer/mamba/conversion.cuh>

using namespace flashinfer::mamba::conversion;

EMULATION_EXPORT int philox(int64_t n, const int64_t* seeds, const int64_t* offsets, uint32_t* words, uint32_t* first) {
  for (int64_t i = 0; i < n; ++i) {
    philox_randint4x<10>(seeds[i], offsets[i], words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    first[2 * i] = philox_randint<10>(seeds[i], offsets[i]);
    first[2 * i + 1] = philox_randint<7>(seeds[i], offsets[i]);
  }
  return 0;
}

EMULATION_EXPORT int halves(int64_t n, const float* x, const uint32_t* bits, __half* one, uint32_t* two) {
  for (int64_t i = 0; i < n; ++i) {
    one[i] = cvt_rs_f16_f32(x[2 * i], bits[i]);
    two[i] = cvt_rs_f16x2_f32(x[2 * i], x[2 * i + 1], bits[i]);
  }
  return 0;
}

EMULATION_EXPORT int e4m3(int64_t n, const float* x, const uint32_t* bits, uint32_t* four) {
  for (int64_t i = 0; i < n; ++i) {
    four[i] = cvt_rs_e4m3x4_f32(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3], bits[i]);
  }
  return 0;
}
