// SPDX-License-Identifier: Apache-2.0
// scale: output[i] = input[i] * factor.
// Kernel headers take raw pointers, sizes and a stream. They know neither Torch nor TVM-FFI, so that a C++ program can
// use them as they are.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer {

/// One thread per element. Multiplies in float32 and rounds once, whatever T is.
template <typename T>
__global__ void ScaleKernel(const T* input, T* output, float factor, int64_t n) {
  // 64-bit before the product: a tensor may have more than 2^31 elements.
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) output[i] = T(float(input[i]) * factor);
}

/// Entry for callers: chooses the grid, launches, and returns the status of CUDA.
template <typename T>
cudaError_t ScaleLauncher(const T* input, T* output, float factor, int64_t n, cudaStream_t stream = nullptr) {
  if (n == 0) return cudaSuccess;  // a grid of zero blocks is an error
  constexpr int THREADS = 256;
  const int64_t blocks = (n + THREADS - 1) / THREADS;
  ScaleKernel<T><<<dim3(blocks), THREADS, 0, stream>>>(input, output, factor, n);
  return cudaGetLastError();
}

}  // namespace flashinfer
