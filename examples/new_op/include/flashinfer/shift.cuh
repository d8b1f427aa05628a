// SPDX-License-Identifier: Apache-2.0
// shift on CUDA (formula and parameters: shift.h). Moves 2 * sizeof(T) bytes per element: bound by DRAM.
// A thread handles one 16-byte vector where input and output are aligned, one element otherwise.
//   test  pytest tests/shift
#pragma once
#include "shift.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {

template <typename T, int VEC>
__global__ void ShiftKernel(const ShiftParams<T> p) {
  const int64_t begin = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
  if (begin + VEC <= p.size) {
    const auto x = Vec<T, VEC>::Load(p.input + begin);
    float y[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] = ToFloat(x[i]) + p.amount;
    RoundTo<T, VEC>(y).Store(p.output + begin);
  } else {
    for (int64_t i = begin; i < p.size; ++i) p.output[i] = FromFloat<T>(ToFloat(p.input[i]) + p.amount);
  }
}

template <typename T>
Status Shift(const ShiftParams<T>& p, Stream stream) {
  constexpr int VEC = 16 / sizeof(T), THREADS = 256;
  const bool aligned = IsAligned(p.input, 16) && IsAligned(p.output, 16);
  const int64_t blocks = CeilDiv(p.size, int64_t(THREADS) * (aligned ? VEC : 1));
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto kernel = aligned ? ShiftKernel<T, VEC> : ShiftKernel<T, 1>;
  return Launch(kernel, dim3(blocks), dim3(THREADS), false, stream, p);
}

}  // namespace flashinfer
