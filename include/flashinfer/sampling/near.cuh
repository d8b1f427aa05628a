// SPDX-License-Identifier: Apache-2.0
// A draw from what top-k and top-p keep of a row of probabilities, in one read of the row (definitions and parameters:
// sampling.h). A cluster of blocks, or one block where rows are many:
//   1. each block guesses a range of the threshold from a sample (guess.cuh);
//   2. warps read chunks of columns, add up the quanta from the range on, and list what is within;
//   3. the leading block finds the threshold in the list, adds what is kept of the list to the chunks, draws a chunk,
//      and reads that chunk again to find the column.
// Where the range does not hold the threshold, or the list does not hold the range, what is known by then makes for a
// better range. If that does not do either, or many columns are equal: again.cuh.
#pragma once
#include "list.cuh"

namespace flashinfer {
namespace sampling {

constexpr int NEAR_TURNS = 3;     // ranges that are tried
constexpr float NEAR_MOST = 3.f;  // lists that columns within a range may fill, for many rows to be read with it

/// Step 3, by the leader: the column for one thread, ELSEWHERE for the others. Or NOT_NEAR, and the range becomes that
/// to be tried next, from 0 on if there is none. found() is called once there will be a column.
template <int THREADS, typename Found>
__device__ __forceinline__ int DrawNear(const SegmentSource& source, Range& range, NearShared& shared,
                                        const Found& found) {
  const Asked asked = shared.asked;
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * (THREADS / 32);
  const bool by_total = asked.ByTotal();
  const NearList<THREADS> list{shared, int(shared.listed), int(shared.listed + shared.sent)};
  uint64_t above = 0, below = 0;
  uint32_t count = 0;
#pragma unroll 1
  for (int w = lane; w < warps; w += 32) {
    above += shared.quanta_above[w], count += shared.count_above[w];
    if (by_total) below += shared.quanta_below[w];
  }
  above = WarpMass(above), count = ptx::ReduceAdd(count);
  const uint32_t low = Bits(range.low), high = Bits(range.high) - 1;
  Limit limits{asked.count, asked.by_mass ? LimitOfProbs(asked.top_p) : UNLIMITED};
  if (by_total) limits.quanta = LimitOfProbs(asked.top_p);  // about
  if (by_total && list.count <= NEAR_LIST) {
    limits.quanta = QuantaLimitOf(asked.top_p, above + WarpSum(below + list.QuantaOfLane()));
  }
  Threshold result{low, above};
  const Range tried = range;
  range.low = 0.f;
  if (limits.count != UNLIMITED || limits.quanta != UNLIMITED) {
    if (count >= limits.count || above >= limits.quanta) {  // the threshold is above
      if (tried.high < 2.f) range = {tried.high, 2.f};
      return NOT_NEAR;
    }
    const bool in_two_steps = asked.top_k_first && !by_total;  // then all that top-k keeps has to be listed
    if (list.count > NEAR_LIST) {
      const int part = min(shared.listed, shared.fitting);
      if (part > 0 && !in_two_steps) {
        const NearList<THREADS> sample{shared, part, part};
        float expected;
        range = Narrow(sample, float(list.count), low, high, count, above, limits, expected, shared.bins, shared.scan);
        if (expected > float(NEAR_LIST)) range = {0.f, tried.high};
      }
      return NOT_NEAR;
    }
    const int searches = in_two_steps ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) limits = {UNLIMITED, QuantaLimitOf(asked.top_p, result.kept_quanta)};
      if (list.count > 0) result = FindNear(list, result.key, high, count, above, limits, shared.bins, shared.scan);
      const bool is_reached = count + list.count >= limits.count || result.kept_quanta >= limits.quanta;
      if (!is_reached && low > 1) {  // it is below
        range = {tried.low * 0.75f, in_two_steps ? tried.high : tried.low};
        return NOT_NEAR;
      }
      __syncthreads();
    }
  }
  if (!IsDrawable(result)) return NOT_NEAR;
  found();
  return DrawListed(source, list, result, shared);
}

/// All steps: the column for one thread of the cluster, -1 if there is none; ELSEWHERE for the others. Or NOT_NEAR for
/// all, where no range did; the last one, from 0 on if there was none.
template <int THREADS, bool MAY_BE_LONG, typename Random>
__device__ __forceinline__ int SampleNear(const SegmentSource& source, const Asked& asked, const Random& random,
                                          Range& range, NearShared& shared) {
  const int thread = threadIdx.x;
  // By a warp and not by a thread, because ptxas keeps a predicate of that one in memory, which barriers wait for.
  if (thread < 32) shared.Start(), shared.asked = asked;
  __syncthreads();
  ptx::ClusterArrive();
  float expected;
  range = GuessRange<THREADS, MAY_BE_LONG>(source, asked, NEAR_LIST, expected, shared.guess, [&] {
    PrefetchChunk(source, ptx::ClusterRank() * (THREADS / 32) + thread / 32);
  });
  ptx::ClusterWait();
  if (expected > NEAR_MOST * NEAR_LIST && ptx::ClusterSize() == 1) {
    if (thread == THREADS - 1) shared.random = random();
    range.low = 0.f;
    return NOT_NEAR;
  }
  const auto tell = [&](const Range& next) {
    if (thread < int(ptx::ClusterSize())) *ptx::InBlock(&shared.next, thread) = {next, false};
    if (thread < 32) {
      ptx::ClusterArrive();
    } else {
      ptx::ClusterArriveRelaxed();  // these have not told anything, and need not wait
    }
  };
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    if (shared.asked.ByTotal()) {
      ListNear<true, false, THREADS>(source, range, -1.f, shared);
    } else {
      ListNear<false, false, THREADS>(source, range, -1.f, shared);
    }
    Range next;
    if (ptx::ClusterRank() != 0) {
      SendList<THREADS>(shared);
      ptx::ClusterSync();
      if (thread < 32) shared.Start();
      ptx::ClusterSync();  // the leader has decided
      next = shared.next;
      if (next.high == 0.f) return ELSEWHERE;
      if (next.low == 0.f) return NOT_NEAR;
    } else {
      if (thread == THREADS - 1) shared.random = random();
      ptx::ClusterSync();
      next = range;
      const int column = DrawNear<THREADS>(source, next, shared, [&] { tell({0.f, 0.f}); });
      if (column != NOT_NEAR) return column;
      if (turn == NEAR_TURNS) next.low = 0.f;
      __syncthreads();
      if (next.low > 0.f && thread < 32) shared.Start();
      tell(next);
      ptx::ClusterWait();
      if (next.low == 0.f) return NOT_NEAR;
      __syncthreads();
    }
    range = next;
  }
}

}  // namespace sampling
}  // namespace flashinfer
