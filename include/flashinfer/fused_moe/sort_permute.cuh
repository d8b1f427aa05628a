// SPDX-License-Identifier: Apache-2.0
// The first two stages of a mixture of experts in one launch, for few pairs. Every block sorts all of them for itself,
// which takes less time than a launch; block 0 writes the tables, and all blocks share the rows of tokens.
#pragma once
#include <algorithm>

#include "../moe_sort.cuh"
#include "rows.cuh"

namespace flashinfer {
namespace fused_moe {

/// Kernel: one pair per thread.
template <typename In, Rounding ROUNDING>
__global__ void __launch_bounds__(ROW_THREADS)
    SortAndPermuteKernel(const __grid_constant__ MoeSortParams s, const __grid_constant__ PermuteParams p) {
  static_assert(ROW_THREADS == FEW_PAIRS, "one pair per thread");
  extern __shared__ int32_t shared_memory[];
  __shared__ int2 scratch[32];
  __shared__ int32_t row_to_pair[FEW_PAIRS];
  const moe::SortMemory memory(shared_memory, s.num_experts);
  const int pair = threadIdx.x, warps = (s.pairs + 31) / 32;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  int expert[1], rank[1];
  moe::CountPairs(s, 0, s.pairs, memory.counters, warps, expert, rank);
  row_to_pair[pair] = -1;
  __syncthreads();
  moe::ScanExperts(s, memory, warps, 1, scratch);
  __syncthreads();
  int row = -1;
  if (expert[0] >= 0) {
    row = memory.bases[expert[0]] + memory.counters[pair / 32 * s.num_experts + expert[0]] + rank[0];
    row_to_pair[row] = pair;
  }
  __syncthreads();
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    if (pair < s.pairs) s.pair_to_row[pair] = row, s.row_to_pair[pair] = row_to_pair[pair];
    for (int i = threadIdx.x; i <= s.num_experts; i += ROW_THREADS) s.expert_offsets[i] = memory.offsets[i];
  }
  for (int to = blockIdx.x; to < memory.offsets[s.num_experts]; to += gridDim.x) {
    PermuteToken<In, ROUNDING>(p, row_to_pair[to] / p.pairs.top_k, [&](const auto& write) { write(to); });
  }
}

FLASHINFER_INLINE Status SortAndPermute(const MoeSortParams& s, const PermuteParams& p, Stream stream) {
  constexpr unsigned BLOCKS = 256;  // two per SM of an H200: each sorts, so more would only wait
  const unsigned along_row = PermuteBlocks(p);
  const dim3 grid(std::max(1u, std::min(unsigned(s.pairs), BLOCKS / along_row)), along_row);
  const size_t bytes = moe::SortMemory::Bytes(s.num_experts, ROW_WARPS);
  const auto launch = [&](auto kernel) {
    return LaunchShared(kernel, grid, dim3(ROW_THREADS), bytes, p.enable_pdl, stream, s, p);
  };
  if (p.output.rounding == Rounding::kBlocks) return launch(SortAndPermuteKernel<__nv_bfloat16, Rounding::kBlocks>);
  if (p.output.rounding != Rounding::kElement) return cudaErrorInvalidValue;
  if (p.element == Element::kE4M3) return launch(SortAndPermuteKernel<uint8_t, Rounding::kElement>);
  return launch(SortAndPermuteKernel<uint16_t, Rounding::kElement>);
}

}  // namespace fused_moe
}  // namespace flashinfer
