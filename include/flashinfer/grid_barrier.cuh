// SPDX-License-Identifier: Apache-2.0
// Barrier of all blocks of a cooperative grid. One thread of each block takes part.
#pragma once
#include "ptx/atomic.cuh"

namespace flashinfer {

/// Arrivals at the barriers of all launches of this unit's kernels. They share a counter without a reset, because no grid
/// arrives before the grid that arrived before it has passed:
/// - A grid is cooperative: its blocks start together. It has more blocks than half of the SMs, each block takes more than half
///   of the shared memory of an SM, and leaves after it has passed. So a grid of another stream starts after a barrier that is
///   complete.
/// - With programmatic dependent launch, a thread arrives after GridDependencyWait, when the grid before has ended.
[[maybe_unused]] static __device__ int32_t grid_barrier;

/// Wait until all blocks are here; writes before the barrier are visible after it. The arrivals of a grid add up to 2^16: the
/// upper half of the counter changes with the last one, which all wait for. It may change again before a thread has looked,
/// since the blocks of the next grid may have started on other SMs.
__device__ __forceinline__ void MeetGrid(int32_t& barrier) {
  const uint32_t mine = blockIdx.x == 0 ? 0x10000u - (gridDim.x - 1u) : 1u;
  const int32_t before = ptx::AddOrdered(&barrier, int32_t(mine));
  while (uint32_t(ptx::LoadAcquire(&barrier) ^ before) < 0x10000u) {
  }
}

}  // namespace flashinfer
