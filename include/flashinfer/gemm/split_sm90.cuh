// SPDX-License-Identifier: Apache-2.0
// Sums of tiles whose K is divided among blocks. Each block writes its part to the workspace; the block that comes last
// adds all of them in the order of K, so that results do not depend on who that is. Nobody waits.
#pragma once
#include "../ptx/barrier.cuh"
#include "params_sm90.cuh"

namespace flashinfer {
namespace gemm {

/// The range of units of K (all tiles in one line) of this block.
struct UnitRange {
  int64_t units;  // of all blocks
  int blocks;     // that have any
  int64_t begin, end;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ UnitRange RangeOfBlock(int64_t units) {
  const int blocks = int(min(int64_t(gridDim.x), units)), block = blockIdx.x;
  if (block >= blocks) return {units, blocks, 0, 0};
  return {units, blocks, RangeBegin(units, blocks, block), RangeBegin(units, blocks, block + 1)};
}

/// Add the parts of tile number `tile` into `d`; returns whether this warpgroup came last and has the sum. `flag`: a word of
/// shared memory of the warpgroup. A block has two places: one for the tile that it starts and does not end, one for the tile
/// that it goes on with.
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
    if (is_last) *counter = 0;  // for the next launch
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
