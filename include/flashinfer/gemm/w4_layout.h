// SPDX-License-Identifier: Apache-2.0
// Order of four-bit weights in memory, written by interleave_moe_weights_for_sm90_mixed_gemm: what a lane of wgmma needs as
// its A operand lies together, so that weights go from shared memory to registers in loads of 16 bytes.
//
// A matrix (n, k) is (n / 16, k / 64) blocks of 16 rows by 64 columns, 512 bytes each. In a block, lane l has 16 bytes:
// word j is its fragment of columns 16 j to 16 j + 15, rows l / 4 and l / 4 + 8. Register i = (row / 8) + 2 (column % 16
// / 8) of the fragment has two columns 2 (l % 4) + {0, 1}; the codes of even columns are in the low half of the word and
// those of odd columns in the high half. In a half, int4 code i has bits 4 i to 4 i + 3. The bits of e2m1 codes are where
// few instructions move them to their place in a 16-bit number (w4_decode.cuh).
#pragma once
#include <cstdint>

#include "../host_device.h"

namespace flashinfer {
namespace gemm {

/// Meaning of four-bit codes and of their scales.
enum class WeightCode : int {
  kE2M1,         // times a power of two per 32 columns: byte s is 2^(s - 127)
  kShiftedE2M1,  // times 2^(byte - 6) per 32 columns, bytes 1 to 12
  kInt4,         // two's complement, times a bf16 per 128 columns
};

constexpr int W4_BLOCK_ROWS = 16, W4_BLOCK_COLUMNS = 64, W4_BLOCK_BYTES = 512;

/// Positions in a half word of the bits of e2m1 code i: sign, then the magnitude from its highest bit. Packed by
/// mixed_weights.py with the same table.
constexpr int E2M1_BITS[4][4] = {{15, 8, 7, 6}, {12, 5, 4, 3}, {14, 11, 10, 9}, {13, 2, 1, 0}};

/// Return code i of a half word.
template <bool IS_INT4>
inline uint32_t CodeOf(uint32_t half, int i) {
  if (IS_INT4) return half >> (4 * i) & 15;
  const int* const bits = E2M1_BITS[i];  // the magnitude is contiguous
  return (half >> bits[0] & 1) << 3 | (half >> bits[3] & 7);
}

/// Call put(column, code) for the 64 codes of `row` in the block of columns at `column` of a matrix with k columns.
template <bool IS_INT4, typename Put>
inline void ForEachCode(const uint8_t* data, int64_t row, int64_t column, int64_t k, const Put& put) {
  const int64_t block = row / W4_BLOCK_ROWS * (k / W4_BLOCK_COLUMNS) + column / W4_BLOCK_COLUMNS;
  const uint8_t* const lanes = data + block * W4_BLOCK_BYTES + row % 8 * 64;
  const int i = int(row % W4_BLOCK_ROWS / 8);
  for (int lane = 0; lane < 4; ++lane) {
    for (int at = 0; at < 8; ++at) {  // half words: two per 16 columns
      const uint8_t* const bytes = lanes + lane * 16 + at * 2;
      const uint32_t half = uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8;
      const int64_t first = column + at / 2 * 16 + 2 * lane + at % 2;
      put(first, CodeOf<IS_INT4>(half, i));
      put(first + 8, CodeOf<IS_INT4>(half, i + 2));
    }
  }
}

}  // namespace gemm
}  // namespace flashinfer
