// SPDX-License-Identifier: Apache-2.0
// scale: y = x * factor, elementwise. Moves 2 * sizeof(T) bytes per element, so DRAM bound.
// A thread handles one 16-byte vector where input and output are aligned, one element otherwise.
//   test  pytest tests/test_scale.py      bench  python benchmarks/bench_scale.py
#pragma once
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {

template <typename T, int VEC>
__global__ void ScaleKernel(const T* input, T* output, float factor, int64_t n) {
  const int64_t begin = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
  if (begin + VEC <= n) {
    const auto x = Vec<T, VEC>::Load(input + begin);
    float y[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] = ToFloat(x[i]) * factor;
    RoundTo<T, VEC>(y).Store(output + begin);
  } else {
    for (int64_t i = begin; i < n; ++i) output[i] = FromFloat<T>(ToFloat(input[i]) * factor);
  }
}

template <typename T>
cudaError_t ScaleLauncher(const T* input, T* output, float factor, int64_t n, cudaStream_t stream = nullptr) {
  if (n == 0) return cudaSuccess;
  constexpr int VEC = 16 / sizeof(T), THREADS = 256;
  const bool aligned = IsAligned(input, 16) && IsAligned(output, 16);
  const int64_t blocks = CeilDiv(n, int64_t(THREADS) * (aligned ? VEC : 1));
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto kernel = aligned ? ScaleKernel<T, VEC> : ScaleKernel<T, 1>;
  return Launch(kernel, dim3(blocks), dim3(THREADS), false, stream, input, output, factor, n);
}

}  // namespace flashinfer
