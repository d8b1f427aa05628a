// SPDX-License-Identifier: Apache-2.0
// Order of (token, slot) pairs by expert on CUDA; parameters in sort.h. Bound by latency.
//
//   up to 4096 pairs   MoeSortKernel, one block: count, prefix sums over experts, scatter
//   more               MoeSortCountKernel counts the pairs of each block of 4096 to the workspace; MoeSortKernel reads the
//                      counts of all blocks (kilobytes, from L2) and scatters its own pairs
//   up to 131072, SM90 one launch of a cluster of 2 to 8 blocks, which meet when the workspace has their counts
//
// Within a block, a warp owns 32 * ITEMS (1, 4 or 16) neighbouring pairs and walks them in order. Lanes with the same expert find
// each other with match_any; the first of them adds their number to the warp's counter in shared memory. The rank of a
// pair is the counter before, plus lanes before it: no atomics, so the order is that of the pairs.
//   test  pytest tests/fused_moe/test_moe_sort.py      bench  python benchmarks/bench_moe_sort.py
#pragma once
#include "sort.h"
#include "../ptx/cluster.cuh"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "../warp.cuh"

namespace flashinfer {
namespace moe {

/// Shared memory of a block, in this order.
struct SortMemory {
  int32_t* offsets;       // (num_experts + 1,) first rows
  int32_t* tile_offsets;  // (num_experts + 1,) first tiles
  int32_t* ends;          // (num_experts,) ends of rows without gaps
  int32_t* bases;         // (num_experts,) first rows of this block
  uint16_t* counters;     // (warps that have pairs, num_experts)

  __device__ SortMemory(int32_t* memory, int num_experts)
      : offsets(memory),
        tile_offsets(offsets + num_experts + 1),
        ends(tile_offsets + num_experts + 1),
        bases(ends + num_experts),
        counters(reinterpret_cast<uint16_t*>(bases + num_experts)) {}

  static size_t Bytes(int num_experts, int warps) {
    return (4 * size_t(num_experts) + 2) * sizeof(int32_t) + size_t(warps) * num_experts * sizeof(uint16_t);
  }
};

/// Count the pairs of the block by warp and expert, and keep the expert and the rank within the warp of each pair of
/// this thread. `experts` is -1 for pairs that are skipped.
template <int ITEMS>
__device__ __forceinline__ void CountPairs(const MoeSortParams& p, int first, int last, uint16_t* counters, int warps,
                                           int (&experts)[ITEMS], int (&ranks)[ITEMS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int pair = first + (warp * ITEMS + i) * 32 + lane;
    const uint32_t expert = pair < last ? uint32_t(p.experts[pair]) - uint32_t(p.first_expert) : ~0u;
    experts[i] = expert < uint32_t(p.num_experts) ? int(expert) : -1;
  }
  for (int i = threadIdx.x; i < warps * p.num_experts; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  if (warp >= warps) return;
  uint16_t* const own = counters + warp * p.num_experts;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const uint32_t same = __match_any_sync(ALL_LANES, experts[i]), before = same & ((1u << lane) - 1);
    int counted = 0;
    if (experts[i] >= 0) counted = own[experts[i]];
    __syncwarp();
    if (experts[i] >= 0 && before == 0) own[experts[i]] = uint16_t(counted + __popc(same));
    __syncwarp();
    ranks[i] = counted + __popc(before);
  }
}

/// Replace the counters of an expert by their sums over the warps before; return the sum over all warps.
__device__ __forceinline__ int ScanWarps(uint16_t* counters, int warps, int num_experts, int expert) {
  int sum = 0;
  for (int warp = 0; warp < warps; ++warp) {
    uint16_t& counter = counters[warp * num_experts + expert];
    const int count = counter;
    counter = uint16_t(sum);
    sum += count;
  }
  return sum;
}

/// Return the sum of both numbers over the threads before this one. `scratch` holds 32 pairs.
__device__ __forceinline__ int2 ScanBlock(int2 x, int2* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int2 sum{WarpInclusiveScan(x.x), WarpInclusiveScan(x.y)};
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  const int2 of_warp = lane < warps ? scratch[lane] : int2{0, 0};
  const int before_x = WarpInclusiveScan(of_warp.x) - of_warp.x, before_y = WarpInclusiveScan(of_warp.y) - of_warp.y;
  return {__shfl_sync(ALL_LANES, before_x, warp) + sum.x - x.x, __shfl_sync(ALL_LANES, before_y, warp) + sum.y - x.y};
}

/// Return the expert whose range of `offsets` has `x`: the last one that begins at or before it.
__device__ __forceinline__ int ExpertOf(const int32_t* offsets, int num_experts, int x) {
  int low = 0, high = num_experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Threads of a block; the second launch bound lets a thread have 64 registers.
template <int ITEMS>
constexpr int MAX_SORT_THREADS = ITEMS == 1 ? 1024 : MOE_SORT_BLOCK_PAIRS / ITEMS;

/// Pairs of a block: [first, last).
template <int ITEMS>
struct BlockPairs {
  int first, last, warps;  // warps that have pairs

  __device__ explicit BlockPairs(int pairs)
      : first(blockIdx.x * blockDim.x * ITEMS), last(min(first + int(blockDim.x) * ITEMS, pairs)) {
    warps = (last - first + 32 * ITEMS - 1) / (32 * ITEMS);
  }
};

/// Write the counts of the block to the workspace, for all blocks.
__device__ __forceinline__ void WriteCounts(const MoeSortParams& p, const SortMemory& memory, int warps) {
  for (int expert = threadIdx.x; expert < p.num_experts; expert += blockDim.x) {
    p.workspace[blockIdx.x * p.num_experts + expert] = ScanWarps(memory.counters, warps, p.num_experts, expert);
  }
}

/// Kernel: count the pairs of each block by expert. `workspace` is (blocks, num_experts).
template <int ITEMS>
__global__ void __launch_bounds__(MAX_SORT_THREADS<ITEMS>, 1)
    MoeSortCountKernel(const __grid_constant__ MoeSortParams p) {
  extern __shared__ int32_t shared_memory[];
  const SortMemory memory(shared_memory, p.num_experts);
  const BlockPairs<ITEMS> block(p.pairs);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  int experts[ITEMS], ranks[ITEMS];
  CountPairs(p, block.first, block.last, memory.counters, block.warps, experts, ranks);
  __syncthreads();
  WriteCounts(p, memory, block.warps);
}

/// Write the tables of tiles and the rows that no pair has, by all threads of the grid.
__device__ __forceinline__ void WriteTables(const MoeSortParams& p, const SortMemory& memory) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  if (p.row_to_pair != nullptr) {
    const int rows = memory.offsets[p.num_experts];
    for (int row = p.align == 1 ? rows + thread : thread; row < p.max_rows; row += threads) {
      const bool is_used = row < rows && row < memory.ends[ExpertOf(memory.offsets, p.num_experts, row)];
      if (!is_used) p.row_to_pair[row] = -1;
    }
  }
  if (p.tile == 0) return;
  const int tiles = memory.tile_offsets[p.num_experts];
  if (thread == 0 && p.num_tiles != nullptr) *p.num_tiles = tiles;
  for (int tile = thread; tile < p.max_tiles; tile += threads) {
    int expert = -1, begin = -1, end = -1;
    if (tile < tiles) {
      expert = ExpertOf(memory.tile_offsets, p.num_experts, tile);
      begin = memory.offsets[expert] + (tile - memory.tile_offsets[expert]) * p.tile;
      end = min(begin + p.tile, memory.ends[expert]);
    }
    if (p.tile_expert != nullptr) p.tile_expert[tile] = expert;
    if (p.tile_begin != nullptr) p.tile_begin[tile] = begin;
    if (p.tile_end != nullptr) p.tile_end[tile] = end;
  }
}

/// Fill the tables of `memory` but for the counters, which become sums over the warps before unless they are already.
/// `blocks`: those that share the pairs, whose counts are in the workspace if they are several.
template <bool ARE_SUMS = false>
__device__ __forceinline__ void ScanExperts(const MoeSortParams& p, const SortMemory& memory, int warps, int blocks,
                                            int2* scratch) {
  const auto rows_of = [&](int count) { return (count + p.align - 1) / p.align * p.align; };
  const auto tiles_of = [&](int count) { return p.tile > 0 ? (count + p.tile - 1) / p.tile : 0; };
  // A thread has neighbouring experts. Until the sums are known, `ends` has counts of all blocks and `bases` those of
  // the blocks before.
  const int per_thread = (p.num_experts + blockDim.x - 1) / blockDim.x;
  const int begin = threadIdx.x * per_thread, end = min(begin + per_thread, p.num_experts);
  int2 sum{0, 0};
  for (int expert = begin; expert < end; ++expert) {
    int before = 0, total = 0;
    if (!ARE_SUMS) total = ScanWarps(memory.counters, warps, p.num_experts, expert);
    if (blocks > 1) {
      total = 0;
#pragma unroll 8
      for (int block = 0; block < blocks; ++block) {
        const int count = p.workspace[block * p.num_experts + expert];
        before += block < int(blockIdx.x) ? count : 0;
        total += count;
      }
    }
    memory.ends[expert] = total;
    memory.bases[expert] = before;
    sum.x += rows_of(total);
    sum.y += tiles_of(total);
  }
  int2 offset = ScanBlock(sum, scratch);
  for (int expert = begin; expert < end; ++expert) {
    const int total = memory.ends[expert];
    memory.offsets[expert] = offset.x;
    memory.tile_offsets[expert] = offset.y;
    memory.ends[expert] = offset.x + total;
    memory.bases[expert] += offset.x;
    offset.x += rows_of(total);
    offset.y += tiles_of(total);
  }
  if (begin < p.num_experts && end == p.num_experts) {
    memory.offsets[end] = offset.x;
    memory.tile_offsets[end] = offset.y;
  }
}

/// Kernel: scatter pairs to rows. With one block, or a cluster of blocks, it counts as well; otherwise the workspace has the
/// counts.
template <int ITEMS, int MAX_THREADS, bool IS_CLUSTER = false>
__global__ void __launch_bounds__(MAX_THREADS, 1) MoeSortKernel(const __grid_constant__ MoeSortParams p) {
  extern __shared__ int32_t shared_memory[];
  __shared__ int2 scratch[32];
  const SortMemory memory(shared_memory, p.num_experts);
  const BlockPairs<ITEMS> block(p.pairs);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  int experts[ITEMS], ranks[ITEMS];
  CountPairs(p, block.first, block.last, memory.counters, block.warps, experts, ranks);
  __syncthreads();
  if (IS_CLUSTER) {
    WriteCounts(p, memory, block.warps);
    ptx::ClusterSync();
  }
  ScanExperts<IS_CLUSTER>(p, memory, block.warps, int(gridDim.x), scratch);
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int pair = block.first + (warp * ITEMS + i) * 32 + lane;
    if (pair >= block.last) continue;
    int row = -1;
    if (experts[i] >= 0) {
      row = memory.bases[experts[i]] + memory.counters[warp * p.num_experts + experts[i]] + ranks[i];
      if (p.row_to_pair != nullptr) p.row_to_pair[row] = pair;
    }
    p.pair_to_row[pair] = row;
  }
  if (blockIdx.x == 0) {
    if (p.counters != nullptr && threadIdx.x < MOE_SORT_COUNTERS) p.counters[threadIdx.x] = 0;
    for (int expert = threadIdx.x; expert <= p.num_experts; expert += blockDim.x) {
      p.expert_offsets[expert] = memory.offsets[expert];
      if (expert == p.num_experts) {
        if (p.num_rows != nullptr) *p.num_rows = memory.offsets[expert];
      } else if (p.expert_counts != nullptr) {
        p.expert_counts[expert] = memory.ends[expert] - memory.offsets[expert];
      }
    }
  }
  WriteTables(p, memory);
}

template <int ITEMS>
Status SortPairs(const MoeSortParams& p, int threads, Stream stream) {
  const int blocks = int(CeilDiv(p.pairs, int64_t(threads) * ITEMS));
  const int warps = std::min<int64_t>(threads / 32, CeilDiv(p.pairs, 32 * ITEMS));
  const size_t bytes = SortMemory::Bytes(p.num_experts, warps);
  if (blocks > 1) {
    const Status status =
        LaunchShared(MoeSortCountKernel<ITEMS>, dim3(blocks), dim3(threads), bytes, p.enable_pdl, stream, p);
    if (status != cudaSuccess) return status;
  }
  return LaunchShared(MoeSortKernel<ITEMS, MAX_SORT_THREADS<ITEMS>>, dim3(std::max(blocks, 1)), dim3(threads), bytes,
                      p.enable_pdl, stream, p);
}

constexpr int SORT_CLUSTER = 8, SORT_CLUSTER_THREADS = 1024;

/// Sort the pairs of 2 to 8 blocks in one launch.
template <int ITEMS>
Status SortInCluster(const MoeSortParams& p, Stream stream) {
  const int blocks = int(CeilDiv(p.pairs, SORT_CLUSTER_THREADS * ITEMS));
  const size_t bytes = SortMemory::Bytes(p.num_experts, SORT_CLUSTER_THREADS / 32);
  const LaunchConfig launch(dim3(blocks), dim3(SORT_CLUSTER_THREADS), bytes, p.enable_pdl, stream, blocks);
  return launch.Launch(MoeSortKernel<ITEMS, SORT_CLUSTER_THREADS, true>, p);
}

}  // namespace moe

FLASHINFER_INLINE Status MoeSort(const MoeSortParams& p, Stream stream) {
  constexpr int FEW_EXPERTS = 512;  // as many have counters for 32 warps in 48 KB
  if (p.num_experts > FEW_EXPERTS) return moe::SortPairs<16>(p, MOE_SORT_BLOCK_PAIRS / 16, stream);
  if (p.has_clusters && p.pairs > MOE_SORT_BLOCK_PAIRS) {
    constexpr int BLOCKS = moe::SORT_CLUSTER * moe::SORT_CLUSTER_THREADS;
    if (p.pairs <= 4 * BLOCKS) return moe::SortInCluster<4>(p, stream);
    if (p.pairs <= 8 * BLOCKS) return moe::SortInCluster<8>(p, stream);
    if (p.pairs <= 16 * BLOCKS) return moe::SortInCluster<16>(p, stream);
  }
  if (p.pairs > 1024) return moe::SortPairs<4>(p, MOE_SORT_BLOCK_PAIRS / 4, stream);
  const int threads = int(CeilDiv(std::max(p.pairs, p.num_experts), 32)) * 32;
  return moe::SortPairs<1>(p, threads, stream);
}

}  // namespace flashinfer
