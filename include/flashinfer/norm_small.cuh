// SPDX-License-Identifier: Apache-2.0
// RMSNorm of small batches on CUDA (formulas: norm.h; large ones: norm.cuh). A block of a fixed number of threads holds
// a row, two 16-byte vectors per thread.
//
// The time of a small batch is the launch plus one DRAM round trip, so the number of instructions before and after the
// loads matters: the number of threads is a compile-time constant, rows have no heads, vectors outside of a row are
// predicated off, nothing is prefetched, and the parameters of the plain form fill one line of the constant cache.
//
// Measured on an H200 (bf16, after a memset of 512 MB; against the kernels for any batch): 128 x 8192 5.76 -> 5.65 us,
// 128 x 5120 5.30 -> 5.21, 128 x 2048 4.83 -> 4.65, 1024 x 1024 5.46 -> 5.18, 1 x 1024 4.15 -> 3.81, with a residual
// 4.39 -> 3.91. Of 128 x 8192 an empty kernel takes 3.0 us, a copy 5.2; a block waits for its last vector for 2950
// cycles, adds up in 400 and writes in 300. Running the code once before the data arrive, so that it is fetched by
// then, takes 0.4 us more, one or four vectors per thread 0.2; weights loaded or multiplied earlier, the last sum by
// shuffles, a cluster for a row, an extra warp that fetches code, prefetched output: within 0.1 us or slower.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include "norm_row.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"

namespace flashinfer {
namespace norm {

/// RMSNormParams of rows without heads. Members that only some forms read are last.
template <typename T>
struct SmallArgs {
  const T* input;
  const T* weight;
  void* out;
  uint32_t input_stride, out_stride, hidden;
  float inv_hidden, eps, weight_bias;
  T* residual;
  const float* scale;
  uint32_t residual_stride;
  NormOut out_kind;
};

/// Return the sum of N numbers, added in pairs. N is a power of two.
template <int N>
__device__ __forceinline__ float PairwiseSum(const float* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    return PairwiseSum<N / 2>(x) + PairwiseSum<N / 2>(x + N / 2);
  }
}

/// Return the sum over a block of WARPS warps.
template <int WARPS>
__device__ __forceinline__ float SumOfWarps(float x, float* scratch) {
  x = GroupSum(x, 32);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float parts[WARPS];
  LoadFloats<WARPS>(scratch, parts);
  return PairwiseSum<WARPS>(parts);
}

template <typename T, typename F, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) RMSNormSmallKernel(const __grid_constant__ SmallArgs<T> a) {
  using V = Vec<T, VEC>;
  __shared__ alignas(16) float scratch[THREADS / 32];
  ptx::GridDependencyWait();
  const T* input = a.input + uint64_t{blockIdx.x} * a.input_stride;
  T* residual = F::RESIDUAL ? a.residual + uint64_t{blockIdx.x} * a.residual_stride : nullptr;
  V x[2], add[2], w[2];
  uint32_t column[2];
  bool inside[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    column[v] = (threadIdx.x + v * THREADS) * VEC;
    inside[v] = column[v] < a.hidden;
    x[v] = add[v] = V::Zero();
    if (inside[v]) x[v] = V::Load(input + column[v]);
    if (F::RESIDUAL && inside[v]) add[v] = V::Load(residual + column[v]);
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    if (inside[v]) w[v] = V::Load(a.weight + column[v]);
  }
  ptx::LaunchDependents();  // also a compiler fence: without it, weights are loaded after the sum
  const float inv_scale = InverseScale<F>(a.scale);

  float s[2][VEC], sum = 0.f;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    Values<F>(x[v], add[v], s[v]);
    sum += SumOfSquares(s[v]);
    if (F::RESIDUAL && inside[v]) RoundTo<T, VEC>(s[v]).Store(residual + column[v]);
  }
  const float rstd = rsqrtf(SumOfWarps<THREADS / 32>(sum, scratch) * a.inv_hidden + a.eps);
  auto* out = static_cast<OutOf<T, F>*>(a.out) + uint64_t{blockIdx.x} * a.out_stride;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    if (!inside[v]) continue;
    Normalise<F>(s[v], rstd, w[v], a.weight_bias, inv_scale);
    StoreVector<F, T>(out + column[v], s[v], a.out_kind);
  }
}

/// Largest number of vectors per row.
constexpr int64_t SMALL_VECTORS = 1024;

/// Launch the kernel for rows of up to SMALL_VECTORS vectors.
template <typename F, typename T>
cudaError_t LaunchSmall(const RMSNormParams<T>& p, cudaStream_t stream) {
  constexpr int VEC = 16 / sizeof(T);
  SmallArgs<T> a{p.input, p.weight, p.out};
  a.input_stride = uint32_t(p.input_stride.batch);
  a.out_stride = uint32_t(p.out_stride.batch);
  a.hidden = uint32_t(p.hidden);
  a.inv_hidden = 1.f / float(p.hidden);
  a.eps = p.eps;
  a.weight_bias = p.weight_bias;
  a.residual = p.residual;
  a.scale = p.scale;
  a.residual_stride = uint32_t(p.residual_stride.batch);
  a.out_kind = p.out_kind;
  auto launch = [&](auto kernel, int threads) {
    return Launch(kernel, dim3(p.num_rows), dim3(threads), p.enable_pdl, stream, a);
  };
  const int64_t vectors = p.hidden / VEC;
  if (vectors <= 128) return launch(RMSNormSmallKernel<T, F, VEC, 64>, 64);
  if (vectors <= 256) return launch(RMSNormSmallKernel<T, F, VEC, 128>, 128);
  if (vectors <= 512) return launch(RMSNormSmallKernel<T, F, VEC, 256>, 256);
  return launch(RMSNormSmallKernel<T, F, VEC, 512>, 512);
}

}  // namespace norm
}  // namespace flashinfer
