// SPDX-License-Identifier: Apache-2.0
// Split-K reduction: sums of tiles whose K is split among blocks. Each block writes its partial sum to the workspace.
// The last block to finish adds all partial sums in the order of K, so that results do not depend on which block is
// last. No block waits for another.
#pragma once
#include "../ptx/barrier.cuh"
#include "params_sm90.cuh"

namespace flashinfer {
namespace gemm {

/// Range of K units of this block, in the concatenated K units of all tiles.
struct UnitRange {
  int64_t units;  // K units of all blocks together
  int blocks;     // blocks with a non-empty range
  int64_t begin, end;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ UnitRange RangeOfBlock(int64_t units) {
  const int blocks = int(min(int64_t(gridDim.x), units)), block = blockIdx.x;
  if (block >= blocks) return {units, blocks, 0, 0};
  return {units, blocks, RangeBegin(units, blocks, block), RangeBegin(units, blocks, block + 1)};
}

/// Add the partial sums of tile number `tile` into `d`. Returns true if this warpgroup finished last and holds the sum.
/// `flag` is a word of shared memory per warpgroup. A block has two slots in the workspace: one for a tile that the
/// block starts but does not finish, one for a tile that an earlier block started.
template <int COUNT>
__device__ __forceinline__ bool AddParts(const GemmParams& p, float (&d)[COUNT], const UnitRange& range, int64_t tile,
                                         int group, volatile int* flag) {
  const int thread = threadIdx.x % WARPGROUP;
  const int first = RangeOwner(range.units, range.blocks, tile * p.k_blocks);
  const int last = RangeOwner(range.units, range.blocks, (tile + 1) * p.k_blocks - 1);
  int* const counter = reinterpret_cast<int*>(p.workspace) + 2 * first + group;
  float* const parts = p.workspace + SPLIT_COUNTER_BYTES / 4 + thread;
  const auto place = [&](int block) {
    const int64_t number = (int64_t(block) * 2 + (block == first)) * CONSUMERS + group;
    return parts + number * (COUNT * WARPGROUP);
  };
  float* const own = place(blockIdx.x);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) __stcg(own + i * WARPGROUP, d[i]);
  __threadfence();
  ptx::BarrierSync(1 + group, WARPGROUP);
  if (thread == 0) {
    const bool is_last = atomicAdd(counter, 1) == last - first;
    if (is_last) *counter = 0;  // reset before the next launch
    __threadfence();
    *flag = is_last;
  }
  ptx::BarrierSync(1 + group, WARPGROUP);
  if (*flag == 0) return false;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) d[i] = 0.f;
  for (int block = first; block <= last; ++block) {
    const float* const part = place(block);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) d[i] += __ldcg(part + i * WARPGROUP);
  }
  return true;
}

#endif

}  // namespace gemm
}  // namespace flashinfer
