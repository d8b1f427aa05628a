// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of experts on CUDA; parameters in bgmv_moe.h. Bound by reading the matrices, few pairs by latency.
//
//   BgmvShrinkKernel   a warp has 4 rows of A (of 16 of a block): it reads x once for them, 8 elements per lane and step
//   BgmvExpandKernel   a thread has one row of B and adds the pairs of its token in their order; x is in shared memory,
//                      RANK_PART numbers at a time, and consecutive threads read consecutive rows
//
// Addresses are known on the device only, so a warp (a thread) looks whether its matrix is aligned to 16 bytes, and
// reads single elements otherwise. Sums of a row have one order: results are the same bits at each call.
//   test  pytest tests/fused_moe/test_bgmv_moe.py      bench  python benchmarks/bench_bgmv_moe.py
#pragma once
#include "bgmv_moe.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace bgmv {

constexpr int THREADS = 128;
constexpr int WARP_ROWS = 4;                           // rows of A that share a read of x
constexpr int SHRINK_ROWS = THREADS / 32 * WARP_ROWS;  // rows of A of a block
constexpr int VEC = 8;                                 // elements of 16 bytes
constexpr int RANK_PART = 128;                         // numbers of x in shared memory

__device__ __forceinline__ float NumberAt(const BgmvNumbers& x, int64_t i) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      return static_cast<const float*>(x.data)[i];
    case BgmvFloat::kHalf:
      return ToFloat(static_cast<const __half*>(x.data)[i]);
    default:
      return ToFloat(static_cast<const __nv_bfloat16*>(x.data)[i]);
  }
}

__device__ __forceinline__ void SetNumber(const BgmvNumbers& x, int64_t i, float value) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      static_cast<float*>(x.data)[i] = value;
      break;
    case BgmvFloat::kHalf:
      static_cast<__half*>(x.data)[i] = FromFloat<__half>(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(x.data)[i] = FromFloat<__nv_bfloat16>(value);
  }
}

__device__ __forceinline__ bool IsVector(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Add the products of N elements per lane and step to the sums of up to WARP_ROWS rows.
template <typename W, int N>
__device__ __forceinline__ void AddRows(const W* x, const W* matrix, int64_t columns, int rows,
                                        float (&sums)[WARP_ROWS]) {
  for (int64_t column = int64_t(threadIdx.x % 32) * N; column < columns; column += 32 * N) {
    const auto a = Vec<W, N>::Load(x + column);
    Vec<W, N> b[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i) {
      b[i] = i < rows ? Vec<W, N>::Load(matrix + i * columns + column) : Vec<W, N>::Zero();
    }
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) sums[i] = fmaf(a.Float(j), b[i].Float(j), sums[i]);
    }
  }
}

/// Kernel: block (x: pair, y: 16 rows of A, z: slice).
template <typename W>
__global__ void __launch_bounds__(THREADS) BgmvShrinkKernel(const __grid_constant__ BgmvShrinkParams p) {
  const int64_t pair = blockIdx.x, row = p.x_rows == nullptr ? pair : p.x_rows[pair];
  const W* matrix = p.by.template Matrix<W>(blockIdx.z, pair);
  if (matrix == nullptr || row < 0) return;
  const int64_t first = int64_t(blockIdx.y) * SHRINK_ROWS + threadIdx.x / 32 * WARP_ROWS;
  if (first >= p.rank) return;
  const int rows = int(min(int64_t(WARP_ROWS), p.rank - first));
  const W* const x = static_cast<const W*>(p.x) + row * p.x_stride;
  matrix += first * p.columns;
  float sums[WARP_ROWS] = {};
  if (p.columns % VEC == 0 && IsVector(x) && IsVector(matrix)) {
    AddRows<W, VEC>(x, matrix, p.columns, rows, sums);
  } else {
    AddRows<W, 1>(x, matrix, p.columns, rows, sums);
  }
#pragma unroll
  for (int i = 0; i < WARP_ROWS; ++i) {
    const float sum = GroupSum(sums[i], 32);
    const int64_t at = (int64_t(blockIdx.z) * p.by.pairs + pair) * p.rank + first + i;
    if (threadIdx.x % 32 == 0 && i < rows) SetNumber(p.y, at, NumberAt(p.y, at) + sum);
  }
}

/// Return the dot product of a row of B and numbers in shared memory.
template <typename W>
__device__ __forceinline__ float Dot(const W* w, const float* x, int n) {
  float sum = 0.f;
  if (n % VEC == 0 && IsVector(w)) {
    for (int i = 0; i < n; i += VEC) {
      const auto part = Vec<W, VEC>::Load(w + i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum = fmaf(part.Float(j), x[i + j], sum);
    }
  } else {
    for (int i = 0; i < n; ++i) sum = fmaf(ToFloat(w[i]), x[i], sum);
  }
  return sum;
}

/// Kernel: block (x: pair or token, y: 128 columns, z: slice).
template <typename W>
__global__ void __launch_bounds__(THREADS) BgmvExpandKernel(const __grid_constant__ BgmvExpandParams p) {
  __shared__ float x[RANK_PART];
  const int64_t row = blockIdx.x, slice = blockIdx.z, column = int64_t(blockIdx.y) * THREADS + threadIdx.x;
  int64_t begin = row, end = row + 1;
  if (p.finalize) {
    begin = p.order == nullptr ? row * p.top_k : p.offsets[row];
    end = p.order == nullptr ? begin + p.top_k : p.offsets[row + 1];
  }
  float sum = 0.f;
  bool is_served = false;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t pair = p.finalize && p.order != nullptr ? p.order[i] : i;
    const W* const matrix = p.by.template Matrix<W>(slice, pair);
    if (matrix == nullptr) continue;  // the same for all threads of the block
    is_served = true;
    float dot = 0.f;
    for (int64_t first = 0; first < p.rank; first += RANK_PART) {
      const int n = int(min(int64_t(RANK_PART), p.rank - first));
      __syncthreads();  // the last part was read
      if (int(threadIdx.x) < n)
        x[threadIdx.x] = NumberAt(p.x, (slice * p.by.pairs + pair) * p.rank + first + threadIdx.x);
      __syncthreads();
      if (column < p.columns) dot += Dot(matrix + column * p.rank + first, x, n);
    }
    sum = fmaf(p.finalize && p.weights != nullptr ? p.weights[pair] : 1.f, dot, sum);
  }
  if (!is_served || column >= p.columns) return;
  const int64_t at = row * p.y_stride + p.slice_starts[slice] + column;
  SetNumber(p.y, at, p.finalize ? fmaf(p.scale, sum, NumberAt(p.y, at)) : p.scale * sum);
}

static_assert(RANK_PART <= THREADS, "each thread reads one number of x");

inline Status CheckGrid(int64_t rows, int64_t parts, int64_t slices) {
  return rows > INT32_MAX || parts > 65535 || slices > 65535 ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace bgmv

template <typename W>
Status BgmvMoeShrink(const BgmvShrinkParams& p, Stream stream) {
  if (p.by.pairs == 0 || p.rank == 0 || p.by.slices == 0) return cudaSuccess;
  const int64_t parts = CeilDiv(p.rank, bgmv::SHRINK_ROWS);
  if (const Status status = bgmv::CheckGrid(p.by.pairs, parts, p.by.slices); status != cudaSuccess) return status;
  const dim3 grid(p.by.pairs, parts, p.by.slices);
  return Launch(bgmv::BgmvShrinkKernel<W>, grid, dim3(bgmv::THREADS), false, stream, p);
}

template <typename W>
Status BgmvMoeExpand(const BgmvExpandParams& p, Stream stream) {
  const int64_t rows = p.finalize ? p.by.tokens : p.by.pairs, parts = CeilDiv(p.columns, bgmv::THREADS);
  if (rows == 0 || p.columns == 0 || p.by.slices == 0 || p.by.pairs == 0) return cudaSuccess;
  if (const Status status = bgmv::CheckGrid(rows, parts, p.by.slices); status != cudaSuccess) return status;
  return Launch(bgmv::BgmvExpandKernel<W>, dim3(rows, parts, p.by.slices), dim3(bgmv::THREADS), false, stream, p);
}

}  // namespace flashinfer
