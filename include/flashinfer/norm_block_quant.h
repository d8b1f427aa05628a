// SPDX-License-Identifier: Apache-2.0
// A residual sum, its RMSNorm, and the norm in e4m3 by blocks of 128 columns, in one pass over memory:
//   s = input + residual (fp32; `residual` gets it rounded)    y = round(s * rsqrt(mean(s^2) + eps) * weight)
//   out = e4m3(y * q), scales = 1 / q, q = 448 / amax of a block of y, or 1 where that is 0
// Defined in norm_block_quant.cuh (CUDA), norm_block_quant_cpu.h (CPU).
//   test  pytest tests/norm/test_norm_block_quant.py      bench  python benchmarks/bench_norm.py -k block_quant
#pragma once
#include "backend.h"

namespace flashinfer {

constexpr int NORM_BLOCK = 128;  // columns of a row that share a scale

template <typename T>
struct NormBlockQuantParams {
  const T* input;
  T* residual;
  const T* weight;
  T* normed;
  uint8_t* out;
  float* scales;  ///< (hidden / 128, rows): rows are contiguous, the stride between blocks is a parameter
  int64_t rows, hidden, input_stride, residual_stride, normed_stride, out_stride, scale_stride;
  float eps;
  bool enable_pdl;  ///< CUDA only: programmatic dependent launch
};

/// T is bfloat16_t or float16_t; hidden is a multiple of 128. On CUDA, rows are aligned to 16 bytes, those of `out` to 8.
template <typename T>
Status NormBlockQuant(const NormBlockQuantParams<T>& params, Stream stream);

}  // namespace flashinfer
