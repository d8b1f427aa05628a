// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a block.
#pragma once
#include "../sampling.cuh"

namespace flashinfer {
namespace sampling {

constexpr int TOP_THREADS = 256, TOP_WARPS = TOP_THREADS / 32;  // threads and warps of a block
constexpr int WIDE_THREADS = 2 * TOP_THREADS;                   // threads of a block that has an SM to itself

struct ScanShared {
  uint64_t by_warp[WIDE_THREADS / 32];
  uint64_t total;
};

/// Return the exclusive prefix sum of x. Two calls must be separated by a barrier.
template <int THREADS = TOP_THREADS, typename T>
__device__ __forceinline__ T BlockBefore(T x, ScanShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T through = WarpInclusiveScan(x);
  if (lane == 31) shared.by_warp[warp] = through;
  __syncthreads();
  T before = through - x;
#pragma unroll
  for (int w = 0; w < THREADS / 32 - 1; ++w) before += w < warp ? T(shared.by_warp[w]) : 0;
  return before;
}

/// Exclusive prefix sums of N numbers over the block.
template <int N>
__device__ __forceinline__ void BlockExclusiveScan(uint64_t (&x)[N], uint64_t (&scratch)[3][MAX_WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t through[N];
  __syncthreads();  // scratch may still be read
#pragma unroll
  for (int n = 0; n < N; ++n) {
    through[n] = WarpInclusiveScan(x[n]);
    if (lane == 31) scratch[n][warp] = through[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    uint64_t before = through[n] - x[n];
    for (int w = 0; w < warp; ++w) before += scratch[n][w];
    x[n] = before;
  }
}

}  // namespace sampling
}  // namespace flashinfer
