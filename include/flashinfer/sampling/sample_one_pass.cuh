// SPDX-License-Identifier: Apache-2.0
// Sampling with top-k and top-p from a row of probabilities in one read of the row (definitions and parameters:
// sampling.h). A cluster of blocks per row, or one block where rows are many:
//   1. each block estimates a range that contains the threshold from a sample (threshold_estimate.cuh);
//   2. warps read chunks of columns, sum the quanta above the range, and list the columns within it (the candidates);
//   3. the leading block finds the threshold in the list, adds the kept candidates to the sums of their chunks,
//      samples a chunk, and reads that chunk again to find the column.
// If the range does not contain the threshold, or the list is too short for the range, the sums known by then give a
// better range. If that fails too, or many columns are equal, sample_retry.cuh takes over.
// Each instantiation of the kernel is compiled as a unit of its own; sample_top_k_top_p.cuh chooses among them.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "candidate_list.cuh"
#include "sample_retry.cuh"

namespace flashinfer {
namespace sampling {

constexpr int ONE_PASS_TURNS = 3;  // ranges that are tried
/// A single block gives up if the expected number of candidates exceeds the list by this factor.
constexpr float MAX_LIST_OVERFLOW = 3.f;

/// Step 3, by the leading block. Returns the column to one thread and ELSEWHERE to the others. On failure returns
/// NOT_FOUND and sets `range` to the next range to try (`low` = 0: none). found() is called as soon as success is
/// certain.
template <int THREADS, typename Found>
__device__ __forceinline__ int DrawFromCandidates(const SegmentSource& source, WeightRange& range,
                                                  OnePassShared& shared, const Found& found) {
  const RequestedFilter requested = shared.requested;
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * (THREADS / 32);
  const bool by_total = requested.ByTotal();
  const CandidateList<THREADS> list{shared, int(shared.listed), int(shared.listed + shared.sent)};
  uint64_t above = 0, below = 0;
  uint32_t count = 0;
#pragma unroll 1
  for (int w = lane; w < warps; w += 32) {
    above += shared.quanta_above[w], count += shared.count_above[w];
    if (by_total) below += shared.quanta_below[w];
  }
  above = WarpMass(above), count = ptx::ReduceAdd(count);
  const uint32_t low = Bits(range.low), high = Bits(range.high) - 1;
  FilterLimits limits{requested.count, requested.by_mass ? LimitOfProbs(requested.top_p) : UNLIMITED};
  if (by_total) limits.quanta = LimitOfProbs(requested.top_p);  // approximate: the exact total is not known yet
  if (by_total && list.count <= CANDIDATES) {
    limits.quanta = QuantaLimitOf(requested.top_p, above + WarpSum(below + list.QuantaOfLane()));
  }
  KeyThreshold result{low, above};
  const WeightRange tried = range;
  range.low = 0.f;
  if (limits.count != UNLIMITED || limits.quanta != UNLIMITED) {
    if (count >= limits.count || above >= limits.quanta) {  // the threshold is above the range
      if (tried.high < 2.f) range = {tried.high, 2.f};
      return NOT_FOUND;
    }
    const bool in_two_steps =
        requested.top_k_first && !by_total;  // top-p needs all columns that top-k keeps in the list
    if (list.count > CANDIDATES) {
      const int part = min(shared.listed, shared.fitting);
      if (part > 0 && !in_two_steps) {
        const CandidateList<THREADS> sample{shared, part, part};
        float expected;
        range =
            Narrow(sample, float(list.count), {low, high}, count, above, limits, expected, shared.bins, shared.scan);
        if (expected > float(CANDIDATES)) range = {0.f, tried.high};
      }
      return NOT_FOUND;
    }
    const int searches = in_two_steps ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) limits = {UNLIMITED, QuantaLimitOf(requested.top_p, result.kept_quanta)};
      if (list.count > 0) result = FindInList(list, {result.key, high}, count, above, limits, shared.bins, shared.scan);
      const bool is_reached = count + list.count >= limits.count || result.kept_quanta >= limits.quanta;
      if (!is_reached && low > 1) {  // the threshold is below the range
        range = {tried.low * 0.75f, in_two_steps ? tried.high : tried.low};
        return NOT_FOUND;
      }
      __syncthreads();
    }
  }
  if (!IsDrawable(result)) return NOT_FOUND;
  found();
  return DrawFromList(source, list, result, shared);
}

/// Run all steps. Returns the column to one thread of the cluster (-1 if there is none) and ELSEWHERE to the others, or
/// NOT_FOUND to all if no range worked; `range` is then the last one that was listed (`low` = 0: none).
template <int THREADS, bool MAY_BE_LONG, typename Random>
__device__ __forceinline__ int SampleOnePass(const SegmentSource& source, const RequestedFilter& requested,
                                             const Random& random, WeightRange& range, OnePassShared& shared) {
  const int thread = threadIdx.x;
  // Executed by a warp instead of a thread: for a thread, ptxas keeps a predicate in local memory, which barriers then
  // wait for.
  if (thread < 32) shared.Start(), shared.requested = requested;
  __syncthreads();
  ptx::ClusterArrive();
  float expected;
  range = EstimateRange<THREADS, MAY_BE_LONG>(source, requested, CANDIDATES, expected, shared.guess, [&] {
    PrefetchChunk(source, ptx::ClusterRank() * (THREADS / 32) + thread / 32);
  });
  ptx::ClusterWait();
  if (expected > MAX_LIST_OVERFLOW * CANDIDATES && ptx::ClusterSize() == 1) {
    if (thread == THREADS - 1) shared.random = random();
    range.low = 0.f;
    return NOT_FOUND;
  }
  const auto tell = [&](const WeightRange& next) {
    if (thread < int(ptx::ClusterSize())) *ptx::InBlock(&shared.next, thread) = {next, false};
    if (thread < 32) {
      ptx::ClusterArrive();
    } else {
      ptx::ClusterArriveRelaxed();  // these threads have written nothing that others read
    }
  };
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    if (shared.requested.ByTotal()) {
      CollectCandidates<true, false, THREADS>(source, range, -1.f, shared);
    } else {
      CollectCandidates<false, false, THREADS>(source, range, -1.f, shared);
    }
    WeightRange next;
    if (ptx::ClusterRank() != 0) {
      SendList<THREADS>(shared);
      ptx::ClusterSync();
      if (thread < 32) shared.Start();
      ptx::ClusterSync();  // the leader has published its decision
      next = shared.next;
      if (next.high == 0.f) return ELSEWHERE;
      if (next.low == 0.f) return NOT_FOUND;
    } else {
      if (thread == THREADS - 1) shared.random = random();
      ptx::ClusterSync();
      next = range;
      const int column = DrawFromCandidates<THREADS>(source, next, shared, [&] { tell({0.f, 0.f}); });
      if (column != NOT_FOUND) return column;
      if (turn == ONE_PASS_TURNS) next.low = 0.f;
      __syncthreads();
      if (next.low > 0.f && thread < 32) shared.Start();
      tell(next);
      ptx::ClusterWait();
      if (next.low == 0.f) return NOT_FOUND;
      __syncthreads();
    }
    range = next;
  }
}

/// MAY_BE_LONG is a separate instantiation, because even skipped code takes time where rows are few.
template <int THREADS, bool MAY_BE_LONG>
__global__ void __launch_bounds__(THREADS, THREADS == TOP_THREADS ? 4 : 1)
    TopKTopPKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  OnePassShared& shared = *reinterpret_cast<OnePassShared*>(memory);
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const auto random = [&] { return RandomOf(p, output); };
  WeightRange range;
  int column = SampleOnePass<THREADS, MAY_BE_LONG>(source, RequestedFilterOf(p, output, row), random, range, shared);
  if (column == NOT_FOUND) {
    if (threadIdx.x >= TOP_THREADS) return;  // barriers do not wait for threads that have returned
    column = SampleRetry(source, range, &shared);
  }
  if (column != ELSEWHERE) WriteToken(p, output, column);
}

template <int THREADS, bool MAY_BE_LONG>
Status LaunchTopKTopP(const SampleParams& p, int cluster, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<TopKTopPKernel<THREADS, MAY_BE_LONG>>(device);
  if (status != cudaSuccess) return status;
  // Clusters of 16 have to be allowed for each kernel first.
  if (cluster > MAX_CLUSTER) {
    cluster = std::min(cluster, LargestCluster<TopKTopPKernel<THREADS, MAY_BE_LONG>>(THREADS, sizeof(OnePassShared)));
  }
  const Geometry g{cluster, THREADS, false, sizeof(OnePassShared)};
  return LaunchClusters(TopKTopPKernel<THREADS, MAY_BE_LONG>, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace sampling
}  // namespace flashinfer
