// SPDX-License-Identifier: Apache-2.0
// Running sums over the threads of a block, for the kernels of top.cuh.
#pragma once
#include "../warp.cuh"

namespace flashinfer {
namespace sampling {

constexpr int TOP_THREADS = 256, TOP_WARPS = TOP_THREADS / 32;  // of a block
constexpr int WIDE_THREADS = 2 * TOP_THREADS;                   // of one that has an SM for itself

struct ScanShared {
  uint64_t by_warp[WIDE_THREADS / 32];
  uint64_t total;
};

/// Sum of the threads before this one. Calls are a barrier apart.
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

}  // namespace sampling
}  // namespace flashinfer
