// SPDX-License-Identifier: Apache-2.0
// A draw from what top-k and top-p keep of a row of probabilities, in one read of the row (definitions and parameters:
// sampling.h). A cluster of blocks, or one block where rows are many:
//   1. each block guesses a range of the threshold from a sample (guess.cuh);
//   2. warps read chunks of columns, add up the quanta from the range on, and list what is within;
//   3. the leading block finds the threshold in the list, adds what is kept of the list to the chunks, draws a chunk,
//      and reads that chunk again to find the column.
// Where the range does not hold the threshold, or the list does not hold the range: again.cuh.
#pragma once
#include "list.cuh"

namespace flashinfer {
namespace sampling {

constexpr float NEAR_MOST = 3.f;  // lists that columns within a range may fill, for many rows to be read with it

/// Step 3, by the leader: the column for one thread, ELSEWHERE for the others. Or NOT_NEAR. found() is called once there
/// will be a column.
template <typename Found>
__device__ __forceinline__ int DrawNear(const SegmentSource& source, const Range& range, NearShared& shared,
                                        const Found& found) {
  const Asked asked = shared.asked;
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * TOP_WARPS;
  const bool by_total = asked.ByTotal();
  const NearList list{shared, int(shared.listed), int(shared.listed + shared.sent)};
  uint64_t above = 0, below = 0;
  uint32_t count = 0;
#pragma unroll 1
  for (int w = lane; w < warps; w += 32) {
    above += shared.quanta_above[w], count += shared.count_above[w];
    if (by_total) below += shared.quanta_below[w];
  }
  above = WarpMass(above), count = ptx::ReduceAdd(count);
  if (list.count > NEAR_LIST) return NOT_NEAR;
  const uint32_t low = Bits(range.low), high = Bits(range.high) - 1;
  Limit limits{asked.count, asked.by_mass ? LimitOfProbs(asked.top_p) : UNLIMITED};
  if (by_total) limits.quanta = QuantaLimitOf(asked.top_p, above + WarpSum(below + list.QuantaOfLane()));
  Threshold result{low, above};
  if (limits.count != UNLIMITED || limits.quanta != UNLIMITED) {
    if (count >= limits.count || above >= limits.quanta) return NOT_NEAR;  // the threshold is above
    const int searches = asked.top_k_first && !by_total ? 2 : 1;           // all that top-k keeps is listed
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) limits = {UNLIMITED, QuantaLimitOf(asked.top_p, result.kept_quanta)};
      if (list.count > 0) result = FindNear(list, result.key, high, count, above, limits, shared.bins, shared.scan);
      const bool is_reached = count + list.count >= limits.count || result.kept_quanta >= limits.quanta;
      if (!is_reached && low > 1) return NOT_NEAR;  // it is below
      __syncthreads();
    }
  }
  if (!IsDrawable(result)) return NOT_NEAR;
  found();
  return DrawListed(source, list, result, shared);
}

/// All steps: the column for one thread of the cluster, -1 if there is none; ELSEWHERE for the others. Or NOT_NEAR for
/// all, where the range did not do; from 0 on if there was none.
template <typename Random>
__device__ __forceinline__ int SampleNear(const SegmentSource& source, const Asked& asked, const Random& random,
                                          Range& range, NearShared& shared) {
  const int thread = threadIdx.x;
  // By a warp and not by a thread, because ptxas keeps a predicate of that one in memory, which barriers wait for.
  if (thread < 32) shared.Start(), shared.asked = asked;
  __syncthreads();
  ptx::ClusterArrive();
  float expected;
  range = GuessRange(source, asked, NEAR_LIST, expected, shared.guess,
                     [&] { PrefetchChunk(source, ptx::ClusterRank() * TOP_WARPS + thread / 32); });
  ptx::ClusterWait();
  if (expected > NEAR_MOST * NEAR_LIST && ptx::ClusterSize() == 1) {
    if (thread == TOP_THREADS - 1) shared.random = random();
    range.low = 0.f;
    return NOT_NEAR;
  }
  if (shared.asked.ByTotal()) {
    ListNear<true, false>(source, range, -1.f, shared);
  } else {
    ListNear<false, false>(source, range, -1.f, shared);
  }
  if (ptx::ClusterRank() != 0) {
    SendList(shared);
    ptx::ClusterSync();
    ptx::ClusterSync();  // the leader has drawn a column or not
    return shared.is_drawn ? ELSEWHERE : NOT_NEAR;
  }
  if (thread == TOP_THREADS - 1) shared.random = random();
  ptx::ClusterSync();
  const auto tell = [&](bool is_drawn) {
    if (thread < int(ptx::ClusterSize())) *ptx::InBlock(&shared.is_drawn, thread) = is_drawn;
    if (thread < 32) {
      ptx::ClusterArrive();
    } else {
      ptx::ClusterArriveRelaxed();  // these have not told anything, and need not wait
    }
  };
  const int column = DrawNear(source, range, shared, [&] { tell(true); });
  if (column == NOT_NEAR) {
    tell(false);
    ptx::ClusterWait();
  }
  return column;
}

}  // namespace sampling
}  // namespace flashinfer
