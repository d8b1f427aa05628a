// SPDX-License-Identifier: Apache-2.0
// Gated norms on CUDA (formulas: gated_norm.h). Bound by memory: a block takes a row, whose values stay in registers
// from the first sum of squares to the second; a lane takes 8 neighbours of a head of 64.
//   test  pytest tests/norm/test_gated_norm.py      bench  python benchmarks/bench_norm.py -k gated
#pragma once
#include "gated_norm.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace gated_norm {

constexpr int VEC = 8;        // elements that a thread loads at once
constexpr int THREADS = 512;  // per block; a row of 8192 is two vectors for each
constexpr int VECTORS = 4;    // per thread at most: rows of up to 16384

__device__ __forceinline__ void LoadRow(const float* from, float (&x)[VEC]) { LoadFloats<VEC>(from, x); }

template <bool NEXT>
__global__ void __launch_bounds__(THREADS) GatedResidualKernel(const __grid_constant__ GatedResidualParams p) {
  __shared__ float scratch[2][32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const int64_t row = blockIdx.x;
  const auto* branch = p.branch + row * p.branch_stride;
  const float* residual = p.residual + row * p.residual_stride;
  float x[VECTORS][VEC], r[VECTORS][VEC], squares = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t at = (int64_t(i) * THREADS + threadIdx.x) * VEC;
    if (at >= p.hidden) continue;
    const auto b = Vec<__nv_bfloat16, VEC>::Load(branch + at);
    auto w = Vec<__nv_bfloat16, VEC>::Zero();
    if (p.weight != nullptr) w = Vec<__nv_bfloat16, VEC>::Load(p.weight + at);
    LoadRow(residual + at, r[i]);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[i][j] = b.Float(j) * (p.weight != nullptr ? w.Float(j) + p.gain_center : 1.f);
      squares += x[i][j] * x[i][j];
    }
  }
  const float factor = rsqrtf(BlockSum(squares, scratch[0]) / float(p.hidden) + p.eps);
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t at = (int64_t(i) * THREADS + threadIdx.x) * VEC;
    if (at >= p.hidden) continue;
    float alpha[VEC], beta[VEC];
    LoadRow(p.beta + at, beta);
    if (p.alpha != nullptr) LoadRow(p.alpha + at, alpha);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[i][j] = (p.alpha != nullptr ? alpha[j] : p.alpha_scalar) * r[i][j] + beta[j] * (x[i][j] * factor);
      squares += x[i][j] * x[i][j];
    }
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
      Vec<float, 4> part{{x[i][j], x[i][j + 1], x[i][j + 2], x[i][j + 3]}};
      part.Store(p.out + row * p.out_stride + at + j);
    }
  }
  if constexpr (NEXT) {
    const float next_factor = rsqrtf(BlockSum(squares, scratch[1]) / float(p.hidden) + p.next_eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int64_t at = (int64_t(i) * THREADS + threadIdx.x) * VEC;
      if (at >= p.hidden) continue;
      const auto w = Vec<__nv_bfloat16, VEC>::Load(p.next_weight + at);
      float y[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        y[j] = x[i][j] * next_factor * (w.Float(j) + p.next_gain_center);
        if (p.router != nullptr) p.router[row * p.router_stride + at + j] = y[j];
      }
      RoundTo<__nv_bfloat16, VEC>(y).Store(p.next + row * p.next_stride + at);
    }
  }
}

/// Eight lanes share a head.
__global__ void __launch_bounds__(256) SigmoidGateKernel(const __grid_constant__ SigmoidGateParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, head = thread / 8;
  const bool inside = head < p.rows * p.heads;  // all lanes take part in the sum
  const int64_t row = head / p.heads, column = head % p.heads * p.dim + thread % 8 * VEC;
  auto x = Vec<__nv_bfloat16, VEC>::Zero(), gate = x;
  if (inside) {
    x = Vec<__nv_bfloat16, VEC>::Load(p.x + row * p.x_stride + column);
    gate = Vec<__nv_bfloat16, VEC>::Load(p.gate + row * p.gate_stride + column);
  }
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) squares += x.Float(j) * x.Float(j);
  const float factor = rsqrtf(GroupSum(squares, 8) / float(p.dim) + p.eps);
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) y[j] = x.Float(j) * factor / (1.f + __expf(-gate.Float(j)));
  if (inside) RoundTo<__nv_bfloat16, VEC>(y).Store(p.x + row * p.x_stride + column);
}

}  // namespace gated_norm

FLASHINFER_INLINE Status GatedResidualNorm(const GatedResidualParams& p, Stream stream) {
  using namespace gated_norm;
  if (p.rows == 0) return cudaSuccess;
  if (p.rows > INT32_MAX || p.hidden > int64_t(THREADS) * VECTORS * VEC) return cudaErrorInvalidValue;
  auto kernel = p.next_weight != nullptr ? GatedResidualKernel<true> : GatedResidualKernel<false>;
  return Launch(kernel, dim3(unsigned(p.rows)), dim3(THREADS), p.enable_pdl, stream, p);
}

FLASHINFER_INLINE Status SigmoidGateNorm(const SigmoidGateParams& p, Stream stream) {
  constexpr int64_t THREADS = 256;
  if (p.rows * p.heads == 0) return cudaSuccess;
  const dim3 grid(unsigned(CeilDiv(p.rows * p.heads * 8, THREADS)));
  return Launch(gated_norm::SigmoidGateKernel, grid, dim3(THREADS), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
