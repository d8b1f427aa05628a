// SPDX-License-Identifier: Apache-2.0
// Residual sum, RMSNorm and quantisation by blocks on CUDA (formulas: norm_block_quant.h). Bound by memory: a thread
// block takes a row, whose sums stay in registers; 16 lanes, 8 columns each, share a block of 128 columns.
//   test  pytest tests/norm/test_norm_block_quant.py      bench  python benchmarks/bench_norm.py -k block_quant
#pragma once
#include <cuda_fp8.h>

#include "norm_block_quant.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm_block_quant {

constexpr int VEC = 8;      // elements that a thread loads at once
constexpr int VECTORS = 4;  // vectors of a thread at most: rows of up to 16384 with 512 threads
constexpr int LANES = NORM_BLOCK / VEC;
constexpr int MOST_THREADS = 512;

__device__ __forceinline__ float GroupMaxOfBlock(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

/// Multiply by `q` and convert; amax * q may round to just above 448, so the conversion saturates.
__device__ __forceinline__ uint2 Encode(const float (&y)[VEC], float q) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < VEC; j += 2) {
    const float2 pair = {y[j] * q, y[j + 1] * q};
    words[j / 4] |= uint32_t(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (j % 4 * 8);
  }
  return {words[0], words[1]};
}

template <typename T>
__global__ void __launch_bounds__(MOST_THREADS)
    NormBlockQuantKernel(const __grid_constant__ NormBlockQuantParams<T> p) {
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const int64_t row = blockIdx.x;
  const T* const input = p.input + row * p.input_stride;
  T* const residual = p.residual + row * p.residual_stride;
  float x[VECTORS][VEC], squares = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t at = (int64_t(i) * blockDim.x + threadIdx.x) * VEC;
    if (at >= p.hidden) continue;
    const auto a = Vec<T, VEC>::Load(input + at), b = Vec<T, VEC>::Load(residual + at);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[i][j] = a.Float(j) + b.Float(j);
      squares += x[i][j] * x[i][j];
    }
    RoundTo<T, VEC>(x[i]).Store(residual + at);
  }
  const float factor = rsqrtf(BlockSum(squares, scratch) / float(p.hidden) + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t first = int64_t(i) * blockDim.x * VEC, at = first + threadIdx.x * VEC;
    if (first >= p.hidden) break;  // uniform: all lanes of a warp take part in the largest magnitude
    const bool inside = at < p.hidden;
    float y[VEC] = {}, amax = 0.f;
    if (inside) {
      const auto w = Vec<T, VEC>::Load(p.weight + at);
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[j] = x[i][j] * factor * w.Float(j);
      const auto rounded = RoundTo<T, VEC>(y);
      rounded.Store(p.normed + row * p.normed_stride + at);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        y[j] = rounded.Float(j);
        amax = fmaxf(amax, fabsf(y[j]));  // NaN is ignored
      }
    }
    amax = GroupMaxOfBlock(amax);
    if (!inside) continue;
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    *reinterpret_cast<uint2*>(p.out + row * p.out_stride + at) = Encode(y, q);
    if (threadIdx.x % LANES == 0) p.scales[at / NORM_BLOCK * p.scale_stride + row] = 1.f / q;
  }
}

}  // namespace norm_block_quant

template <typename T>
Status NormBlockQuant(const NormBlockQuantParams<T>& p, Stream stream) {
  using namespace norm_block_quant;
  if (p.rows == 0) return cudaSuccess;
  if (p.rows > INT32_MAX || p.hidden > int64_t(MOST_THREADS) * VECTORS * VEC) return cudaErrorInvalidValue;
  // A vector for each thread where the row is short enough, in whole warps; else a full block.
  const int64_t wanted = CeilDiv(CeilDiv(p.hidden, int64_t(VEC)), int64_t(32)) * 32;
  const dim3 threads(unsigned(wanted < MOST_THREADS ? wanted : MOST_THREADS));
  return Launch(NormBlockQuantKernel<T>, dim3(unsigned(p.rows)), threads, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
