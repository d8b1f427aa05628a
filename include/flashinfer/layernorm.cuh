// SPDX-License-Identifier: Apache-2.0
// LayerNorm on CUDA (formula and parameters: norm.h). A block per row; the row stays in registers between the mean, the
// variance around it and the result; what does not fit there is read again from L2. Bound by DRAM.
//   test  pytest tests/norm/test_layernorm.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "norm.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

template <bool QUANT, int VEC, int NVEC>
__global__ void __launch_bounds__(1024) LayerNormKernel(const __grid_constant__ LayerNormParams p) {
  using T = __nv_bfloat16;
  __shared__ float scratch[2][32];
  const int step = blockDim.x * VEC;
  const int begin = threadIdx.x * VEC;
  const int64_t row = blockIdx.x;
  const T* input = p.input + row * p.input_stride;
  const float inv_scale = QUANT ? 1.f / *p.scale : 1.f;

  Vec<T, VEC> x[NVEC];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int64_t column = begin + int64_t(v) * step;
    x[v] = column < p.hidden ? Vec<T, VEC>::Load(input + column) : Vec<T, VEC>::Zero();
  }
  const int64_t tail = begin + int64_t(NVEC) * step;

  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += ToFloat(x[v][i]);
  }
  for (int64_t column = tail; column < p.hidden; column += step) {
    const auto more = Vec<T, VEC>::Load(input + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += ToFloat(more[i]);
  }
  const float mean = BlockSum(sum, scratch[0]) / float(p.hidden);

  float square = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    if (begin + int64_t(v) * step < p.hidden) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) square += (ToFloat(x[v][i]) - mean) * (ToFloat(x[v][i]) - mean);
    }
  }
  for (int64_t column = tail; column < p.hidden; column += step) {
    const auto more = Vec<T, VEC>::Load(input + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) square += (ToFloat(more[i]) - mean) * (ToFloat(more[i]) - mean);
  }
  const float rstd = rsqrtf(BlockSum(square, scratch[1]) / float(p.hidden) + p.eps);

  auto finish = [&](int64_t column, const Vec<T, VEC>& value) {
    float y[VEC], gamma[VEC], beta[VEC];
    LoadFloats(p.gamma + column, gamma);
    LoadFloats(p.beta + column, beta);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      y[i] = (ToFloat(value[i]) - mean) * rstd * gamma[i] + beta[i];
      if constexpr (QUANT) y[i] = ToFloat(FromFloat<T>(y[i]));  // the contract quantises the bfloat16 result
    }
    const int64_t out = row * p.out_stride + column;
    if constexpr (QUANT) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) y[i] *= inv_scale;
      StoreFp8<VEC>(static_cast<uint8_t*>(p.out) + out, y, p.out_kind == NormOut::kE4M3 ? __NV_E4M3 : __NV_E5M2);
    } else {
      RoundTo<T, VEC>(y).Store(static_cast<T*>(p.out) + out);
    }
  };
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int64_t column = begin + int64_t(v) * step;
    if (column < p.hidden) finish(column, x[v]);
  }
  for (int64_t column = tail; column < p.hidden; column += step) finish(column, Vec<T, VEC>::Load(input + column));
}

template <bool QUANT>
cudaError_t DispatchLayerNorm(const LayerNormParams& p, cudaStream_t stream) {
  constexpr int VEC = 8;
  const bool vectorise = p.hidden % VEC == 0 && p.input_stride % VEC == 0 && p.out_stride % VEC == 0 &&
                         IsAligned(p.input, 16) && IsAligned(p.out, QUANT ? 8 : 16) && IsAligned(p.gamma, 16) &&
                         IsAligned(p.beta, 16);
  const dim3 rows(p.num_rows);
  if (vectorise)
    return Launch(LayerNormKernel<QUANT, VEC, 2>, rows, dim3(BlockThreads(p.hidden, 2 * VEC)), false, stream, p);
  return Launch(LayerNormKernel<QUANT, 1, 8>, rows, dim3(BlockThreads(p.hidden, 8)), false, stream, p);
}

}  // namespace norm

FLASHINFER_INLINE Status LayerNorm(const LayerNormParams& p, Stream stream) {
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  if (p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  return p.out_kind == NormOut::kSame ? norm::DispatchLayerNorm<false>(p, stream)
                                      : norm::DispatchLayerNorm<true>(p, stream);
}

}  // namespace flashinfer
