// SPDX-License-Identifier: Apache-2.0
// The first two stages of a mixture of experts in one launch, for few pairs. Every block sorts all of them for itself,
// which takes less time than a launch; block 0 writes the tables, and all blocks share the tokens.
// Bound by latency.
//   test  pytest tests/fused_moe/test_emulated_stages.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include <algorithm>

#include "sort.cuh"
#include "rows.cuh"

namespace flashinfer {
namespace fused_moe {

/// Kernel: ITEMS pairs per thread. A block reads (and quantises) a token once and writes it to the rows of its experts.
template <typename In, Rounding ROUNDING, int ITEMS>
__global__ void __launch_bounds__(ROW_THREADS)
    SortAndPermuteKernel(const __grid_constant__ MoeSortParams s, const __grid_constant__ PermuteParams p) {
  extern __shared__ int32_t shared_memory[];
  __shared__ int2 scratch[32];
  __shared__ int32_t pair_to_row[ROW_THREADS * ITEMS];
  const moe::SortMemory memory(shared_memory, s.num_experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (s.pairs + 32 * ITEMS - 1) / (32 * ITEMS);
  const bool writes_tables = blockIdx.x == 0 && blockIdx.y == 0;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  int experts[ITEMS], ranks[ITEMS];
  moe::CountPairs(s, 0, s.pairs, memory.counters, warps, experts, ranks);
  __syncthreads();
  moe::ScanExperts(s, memory, warps, 1, scratch);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int pair = (warp * ITEMS + i) * 32 + lane;
    int row = -1;
    if (experts[i] >= 0) {
      row = memory.bases[experts[i]] + memory.counters[warp * s.num_experts + experts[i]] + ranks[i];
    }
    pair_to_row[pair] = row;
    if (!writes_tables || pair >= s.pairs) continue;
    s.pair_to_row[pair] = row;
    if (row >= 0) s.row_to_pair[row] = pair;
  }
  if (writes_tables) {
    const int rows = memory.offsets[s.num_experts];
    if (s.counters != nullptr && threadIdx.x < MOE_SORT_COUNTERS) s.counters[threadIdx.x] = 0;
    for (int i = threadIdx.x; i <= s.num_experts; i += ROW_THREADS) s.expert_offsets[i] = memory.offsets[i];
    for (int i = rows + threadIdx.x; i < s.pairs; i += ROW_THREADS) s.row_to_pair[i] = -1;
  }
  __syncthreads();
  const int top_k = p.pairs.top_k;
  for (int64_t token = blockIdx.x; token < p.pairs.tokens; token += gridDim.x) {
    const int32_t* const rows = pair_to_row + token * top_k;
    PermuteToken<In, ROUNDING>(p, token, [&](const auto& write) {
#pragma unroll 4
      for (int slot = 0; slot < top_k; ++slot) {
        if (rows[slot] >= 0) write(rows[slot]);
      }
    });
  }
}

template <typename In, Rounding ROUNDING>
Status LaunchSortAndPermute(const MoeSortParams& s, const PermuteParams& p, Stream stream) {
  constexpr int MANY = int(FEW_PAIRS) / ROW_THREADS;
  constexpr unsigned BLOCKS = 256;  // two per SM of an H200: each sorts, so more would only wait
  const unsigned along_row = PermuteBlocks(p), tokens = unsigned(p.pairs.tokens);
  const dim3 grid(std::max(1u, std::min(tokens, BLOCKS / along_row)), along_row);
  const size_t bytes = moe::SortMemory::Bytes(s.num_experts, ROW_WARPS);
  auto* const kernel =
      s.pairs <= ROW_THREADS ? SortAndPermuteKernel<In, ROUNDING, 1> : SortAndPermuteKernel<In, ROUNDING, MANY>;
  return LaunchShared(kernel, grid, dim3(ROW_THREADS), bytes, p.enable_pdl, stream, s, p);
}

FLASHINFER_INLINE Status SortAndPermute(const MoeSortParams& s, const PermuteParams& p, Stream stream) {
  if (s.pairs > FEW_PAIRS || s.num_experts > FEW_EXPERTS) return cudaErrorInvalidValue;
  if (p.output.rounding == Rounding::kBlocks) {
    return LaunchSortAndPermute<__nv_bfloat16, Rounding::kBlocks>(s, p, stream);
  }
  if (p.output.rounding != Rounding::kElement) return cudaErrorInvalidValue;
  if (p.element == Element::kE4M3) return LaunchSortAndPermute<uint8_t, Rounding::kElement>(s, p, stream);
  return LaunchSortAndPermute<uint16_t, Rounding::kElement>(s, p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
