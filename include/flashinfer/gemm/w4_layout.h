// SPDX-License-Identifier: Apache-2.0
// Order of four-bit weights in memory, written by interleave_moe_weights_for_sm90_mixed_gemm: what a lane of wgmma needs as
// its A operand lies together, so that weights go from shared memory to registers in loads of 16 bytes.
//
// A matrix (n, k) is (n / 16, k / 64) blocks of 16 rows by 64 columns, 512 bytes each. In a block, lane l has 16 bytes:
// word j is its fragment of columns 16 j to 16 j + 15, rows l / 4 and l / 4 + 8. Register i = (row / 8) + 2 (column % 16
// / 8) of the fragment has two columns 2 (l % 4) + {0, 1}; the codes of even columns are in the low half of the word and
// those of odd columns in the high half. In a half, int4 code i has bits 4 i to 4 i + 3. The bits of e2m1 codes are where
// few instructions move them to their place in a 16-bit number (w4_decode.cuh).
//
// Shifted e2m1 codes become e4m3, of which a register has four columns: word 2 s + h has row l / 4 + 8 h and, as code n, column
// 32 s + 16 (n / 4) + 4 (l % 4) + n % 4. Magnitudes are the low bits of nibbles, with which an instruction looks up four e4m3;
// signs are the high bits of nibbles, in the order of SHIFTED_SIGNS.
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

/// Positions of the signs of shifted codes 0 to 7: few instructions move those of four codes to the highest bits of bytes.
constexpr int SHIFTED_SIGNS[8] = {3, 11, 19, 27, 7, 15, 23, 31};

/// Return true if tokens are e4m3 codes, which products multiply as they are. Others are bf16.
FLASHINFER_HD constexpr bool TakesE4M3(WeightCode type) { return type == WeightCode::kShiftedE2M1; }

/// Return the address of the codes of `row` in the block of columns at `column` of a matrix with k columns: 16 words, of which
/// word 4 l + j is that of lane l. Row r + 8 i of a block, r < 8, has codes i and i + 2 of each half word, or, of shifted codes,
/// words i and i + 2 of each lane.
inline const uint8_t* W4RowOf(const uint8_t* data, int64_t row, int64_t column, int64_t k) {
  const int64_t block = row / W4_BLOCK_ROWS * (k / W4_BLOCK_COLUMNS) + column / W4_BLOCK_COLUMNS;
  return data + block * W4_BLOCK_BYTES + row % 8 * 64;
}

}  // namespace gemm
}  // namespace flashinfer
