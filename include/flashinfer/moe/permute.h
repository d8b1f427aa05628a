// SPDX-License-Identifier: Apache-2.0
// Activations of a mixture-of-experts layer in expert order, and back: parameters and entries, shared by both backends.
//   permute   output[row] = input[token of row], as it is or quantised to e4m3
//   finalize  output[token] = sum over slots, in their order, of scale * row of the slot, in fp32, rounded once
// sort.h makes the order. Defined in permute.cuh (CUDA) and cpu/permute.h (CPU).
//   test  pytest tests/fused_moe/test_moe_permute.py      bench  python benchmarks/bench_moe_permute.py
#pragma once
#include <cstdint>

#include "../backend.h"

namespace flashinfer {

struct MoePermuteParams {
  const void* input;  ///< (tokens, columns)
  int64_t input_stride;
  void* output;  ///< (rows, columns)
  int64_t output_stride;
  const int32_t* row_to_pair;  ///< (rows,) token * top_k + slot; negative or of no token: the row is not written
  int64_t rows, tokens;
  int32_t top_k;
  int64_t columns;
  const float* factor = nullptr;  ///< MoePermuteFp8: one number, codes are e4m3(x * factor); null is 1
  float* scales = nullptr;        ///< MoePermuteFp8Block: (columns / 128, rows), rows are contiguous
  int64_t scale_stride = 0;
  bool enable_pdl = false;
};

/// Copy rows. T has the size of an element: 1, 2 or 4 bytes.
template <typename T>
Status MoePermute(const MoePermuteParams& params, Stream stream);

/// Copy rows to e4m3, with one factor for all. T is bfloat16_t or float16_t.
template <typename T>
Status MoePermuteFp8(const MoePermuteParams& params, Stream stream);

/// Copy rows to e4m3, with a scale for 128 columns of a row, by the rule of quantize_1x128.h. T is bfloat16_t or
/// float16_t. On CUDA, rows of the input are aligned to 16 bytes, rows of the output to 8.
template <typename T>
Status MoePermuteFp8Block(const MoePermuteParams& params, Stream stream);

template <typename In, typename Out>
struct MoeFinalizeParams {
  const In* rows;
  int64_t row_stride, num_rows;
  const int32_t* pair_to_row;  ///< (tokens, top_k); negative, or num_rows and more: the slot is skipped
  const float* scales;         ///< (tokens, top_k); null is 1
  Out* output;                 ///< (tokens, columns)
  int64_t output_stride;
  int64_t tokens;
  int32_t top_k;
  int64_t columns;
  bool enable_pdl = false;
};

/// Add up the rows of each token; a token without rows gets zeros. Out is In or float, or In is float.
template <typename In, typename Out>
Status MoeFinalize(const MoeFinalizeParams<In, Out>& params, Stream stream);

}  // namespace flashinfer
