// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a block. The forms differ where one form for all costs registers.
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

/// Exclusive prefix sums of N numbers over the block. The loop over warps is rolled: unrolled as above, searches that
/// use it spill more.
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

/// Exclusive prefix sums of two numbers over the block. Two calls must be separated by a barrier. Both sums advance
/// together: with the form above, CtaPairKernel spills twice as much.
template <int WARPS>
__device__ __forceinline__ void BlockExclusiveScan(uint64_t& a, uint64_t& b, uint64_t (&scratch)[2][WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t through_a = a, through_b = b;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below_a = __shfl_up_sync(ALL_LANES, through_a, offset),
                   below_b = __shfl_up_sync(ALL_LANES, through_b, offset);
    if (lane >= offset) through_a += below_a, through_b += below_b;
  }
  if (lane == 31) scratch[0][warp] = through_a, scratch[1][warp] = through_b;
  __syncthreads();
  a = through_a - a, b = through_b - b;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) a += scratch[0][w], b += scratch[1][w];
  }
}

/// Exclusive prefix sums of the first SUMS of three floats over the block, which are shifted between lanes: subtracting
/// the own number would not be exact. `all` is increased by the total of the first one.
template <int SUMS, int WARPS>
__device__ __forceinline__ void BlockExclusiveScan(const float (&x)[3], float (&before)[3], float& all,
                                                   float (&scratch)[3][WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < SUMS; ++n) {
    const float through = WarpInclusiveScan(x[n]);
    before[n] = __shfl_up_sync(ALL_LANES, through, 1);
    if (lane == 0) before[n] = 0.f;
    if (lane == 31) scratch[n][warp] = through;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    all += scratch[0][w];
#pragma unroll
    for (int n = 0; n < SUMS; ++n) before[n] += w < warp ? scratch[n][w] : 0.f;
  }
}

}  // namespace sampling
}  // namespace flashinfer
