// SPDX-License-Identifier: Apache-2.0
// Convolution and gated norm of a KDA layer (kda_layer.h): a thread takes a channel of a sequence, a warp a head.
//   test  pytest tests/recurrent/test_kda.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../utils.cuh"
#include "../warp.cuh"
#include "kda_layer.h"
#include "step/numbers.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

__global__ void ConvolutionKernel(const __grid_constant__ ConvolutionParams p) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, n = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  if (n >= p.sequences || c >= p.channels) return;
  const bool is_packed = p.starts.data != nullptr;
  const int64_t begin = is_packed ? p.starts.At(n) : n, end = is_packed ? p.starts.At(n + 1) : n + 1;
  const int64_t slot = p.slots.At(n);
  auto* out = static_cast<__nv_bfloat16*>(p.out);
  if (slot < 1 || begin >= end) {
    for (int64_t t = begin; t < end; ++t) out[t * p.channels + c] = FromFloat<__nv_bfloat16>(0.f);
    return;
  }
  const int64_t width = p.channels / 3;
  const float* weight = p.weight + c / width * 4 * width + c % width;
  auto* state = static_cast<__nv_bfloat16*>(p.state) + slot * p.slot_stride + c * p.channel_stride;
  int64_t first = p.accepted.data != nullptr ? p.accepted.At(n) - 1 : 0;
  first = max(int64_t(0), min(first, p.window - 3));
  __nv_bfloat16 x[4];
  float w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    w[j] = weight[j * width];
    if (j < 3) x[j] = state[(first + j) * p.time_stride];
  }
  state[0] = x[1];
  state[p.time_stride] = x[2];
  for (int64_t t = begin; t < end; ++t) {
    x[3] = static_cast<const __nv_bfloat16*>(p.x)[t * p.x_stride + c];
    float y = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) y += w[j] * ToFloat(x[j]);
    out[t * p.channels + c] = FromFloat<__nv_bfloat16>(y * Sigmoid(y));
    if (2 + t - begin < p.window) state[(2 + t - begin) * p.time_stride] = x[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) x[j] = x[j + 1];
  }
}

__global__ void GatedHeadNormKernel(const __grid_constant__ HeadNormParams p) {
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  float squares = 0.f;
  for (int64_t i = lane; i < p.dim; i += 32) squares += p.x[row * p.dim + i] * p.x[row * p.dim + i];
  const float factor = rsqrtf(WarpSum(squares) / float(p.dim) + p.eps);
  for (int64_t i = lane; i < p.dim; i += 32) {
    const int64_t at = row * p.dim + i;
    const float gate = Sigmoid(ToFloat(static_cast<const __nv_bfloat16*>(p.gate)[at]));
    const float y = p.x[at] * factor * LoadNumber(p.weight, i, p.weight_type) * gate;
    static_cast<__nv_bfloat16*>(p.out)[at] = FromFloat<__nv_bfloat16>(y);
  }
}

}  // namespace step

FLASHINFER_INLINE Status Convolve(const ConvolutionParams& p, Stream stream) {
  constexpr int64_t MAX_GRID_Y = 65535, THREADS = 128;
  if (p.sequences == 0 || p.channels == 0) return cudaSuccess;
  const int64_t deep = CeilDiv(p.sequences, MAX_GRID_Y);
  const dim3 grid(unsigned(CeilDiv(p.channels, THREADS)), unsigned(CeilDiv(p.sequences, deep)), unsigned(deep));
  return Launch(step::ConvolutionKernel, grid, dim3(THREADS), false, stream, p);
}

FLASHINFER_INLINE Status GatedHeadNorm(const HeadNormParams& p, Stream stream) {
  constexpr int64_t WARPS = 4;
  if (p.rows == 0) return cudaSuccess;
  return Launch(step::GatedHeadNormKernel, dim3(unsigned(CeilDiv(p.rows, WARPS))), dim3(32 * WARPS), false, stream, p);
}

}  // namespace recurrent
}  // namespace flashinfer
