// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations to e4m3 by blocks of 128 columns of a row: code = e4m3(x * q), scale = 1 / q, with
// q = 448 / amax, or 1 where amax is 0. Defined in quantize_1x128.cuh (CUDA) and quantize_1x128_cpu.h (CPU).
#pragma once
#include <cstdint>

#include "backend.h"

namespace flashinfer {
namespace gemm {

struct Quantize1x128Params {
  const void* input;  // (rows, columns), 16 bits
  int64_t input_stride;
  uint8_t* codes;  // (rows, columns)
  int64_t code_stride;
  float* scales;  // (columns / 128, rows): rows are contiguous, the stride between column blocks is a parameter
  int64_t scale_stride;
  int64_t rows;
  int blocks;  // columns / 128
  bool enable_pdl;
};

/// Quantise. T is bfloat16_t or float16_t. On CUDA, rows of the input are aligned to 16 bytes, rows of the codes to 8.
template <typename T>
Status Quantize1x128(const Quantize1x128Params& p, Stream stream);

}  // namespace gemm
}  // namespace flashinfer
