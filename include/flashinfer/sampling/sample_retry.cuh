// SPDX-License-Identifier: Apache-2.0
// Sampling from rows for which sample_one_pass.cuh found no good range: flat rows, or rows with many equal columns. The
// listed part gives a better range, or else a fine estimate from a sample (threshold_estimate_rows.cuh); where
// many columns equal the lower end of the range, these ties are counted instead of listed. If no range works, the
// leader searches the row (sample_exact.cuh).
#pragma once
#include "candidate_list.cuh"

namespace flashinfer {
namespace sampling {

constexpr int RETRY_TURNS = 5;  // ranges that are tried
// Listed columns that the next range is estimated from, where the list is incomplete.
constexpr int RETRY_SAMPLE = 3072;
constexpr float RETRY_DEVIATIONS = 2.5f;  // minimum width of a range in standard deviations, if columns are many

/// Count the entries of a list that equal a key.
__device__ __forceinline__ int CountEqual(const CandidateList<>& list, uint32_t key, CandidateBins& bins) {
  uint32_t equal = 0;
  for (int i = threadIdx.x; i < list.count; i += TOP_THREADS) equal += list.shared.keys[list.At(i)] == key;
  equal = ptx::ReduceAdd(equal);
  __syncthreads();
  if (threadIdx.x == 0) bins.count_few = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&bins.count_few, equal);
  __syncthreads();
  return int(bins.count_few);
}

/// Choose the next range where only a part of the columns within was listed: a narrower one; else the key at which the
/// part reaches its share of the limits, if many columns have that key; else the range above a key that the list can
/// hold.
__device__ __forceinline__ TiedRange NarrowToList(const CandidateList<>& list, int part, const TiedRange& tried,
                                                  bool in_two_steps, uint32_t count, uint64_t quanta,
                                                  const FilterLimits& limits, OnePassShared& shared) {
  const CandidateList<> sample{shared, part, part};
  const float all = float(list.count), share = float(part) / all;
  const uint32_t low = Bits(tried.low), high = Bits(tried.high) - 1;
  TiedRange range = tried;
  if (!in_two_steps) {
    float expected;
    const WeightRange narrow =
        Narrow(sample, all, {low, high}, count, quanta, limits, expected, shared.bins, shared.scan);
    const bool is_one = Bits(narrow.low) + 1 == Bits(narrow.high);
    range = {narrow, is_one || (tried.has_ties && narrow.low == tried.low)};
    if (expected <= fmaxf(0.5f * all, float(CANDIDATES)) || range.has_ties) return range;
    __syncthreads();
    const auto share_of = [&](uint64_t limit, uint64_t above) {
      return limit == UNLIMITED ? UNLIMITED : uint64_t(float(limit - above) * share) + 1;
    };
    const FilterLimits of_sample{share_of(limits.count, count), share_of(limits.quanta, quanta)};
    const uint32_t key = FindInList(sample, {low, high}, 0, 0, of_sample, shared.bins, shared.scan).key;
    const int equal = CountEqual(sample, key, shared.bins);
    if (float(equal) > 0.5f * share * float(CANDIDATES)) return {{FromBits(key), FromBits(key + 1)}, true};
  }
  const uint64_t most = max(uint64_t(part) * (CANDIDATES - CANDIDATES / 4) / list.count, uint64_t{1});
  __syncthreads();
  const KeyThreshold last =
      FindInList(sample, {Bits(range.low), Bits(range.high) - 1}, 0, 0, {most, UNLIMITED}, shared.bins, shared.scan);
  return {{FromBits(last.key), range.high}, true};
}

/// DrawFromCandidates for a range with ties. On failure `range` becomes the next range to try (`low` = 0: none).
__device__ __forceinline__ int DrawTied(const SegmentSource& source, int turn, TiedRange& range,
                                        OnePassShared& shared) {
  const RequestedFilter requested = shared.requested;
  const uint64_t known = shared.known;
  // The list of SampleOnePass has entries from all warps of wide blocks.
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * (turn == 0 ? blockDim.x / 32 : TOP_WARPS);
  const bool by_total = requested.ByTotal();
  const TiedRange tried = range;
  const CandidateList<> list{shared, int(shared.listed), int(shared.listed + shared.sent)};
  uint64_t above = 0, below = 0;
  uint32_t count = 0, tied = 0;
#pragma unroll 1
  for (int w = lane; w < warps; w += 32) {
    above += shared.quanta_above[w], count += shared.count_above[w];
    if (by_total) below += shared.quanta_below[w];
    if (tried.has_ties) tied += shared.count_tied[w];
  }
  above = WarpMass(above), count = ptx::ReduceAdd(count), tied = ptx::ReduceAdd(tied);
  const Scale scale(ONE);
  const auto quantum_of = [&](uint32_t key) { return QuantumOf(FromBits(key), scale); };
  const uint32_t low = Bits(range.low), high = Bits(range.high) - 1;
  const uint64_t of_ties = uint64_t{tied} * quantum_of(low);
  FilterLimits limits{requested.count, requested.by_mass ? LimitOfProbs(requested.top_p) : UNLIMITED};
  if (by_total) limits.quanta = LimitOfProbs(requested.top_p);  // approximate: the exact total is not known yet
  if (known != 0) limits = {UNLIMITED, known};
  if (by_total && list.count <= CANDIDATES) {
    limits.quanta = QuantaLimitOf(requested.top_p, above + WarpSum(below + list.QuantaOfLane()) + of_ties);
  }
  KeyThreshold result{low, above};
  range.low = 0.f;
  if (limits.count != UNLIMITED || limits.quanta != UNLIMITED) {
    if (count >= limits.count || above >= limits.quanta) {  // the threshold is above the range
      if (tried.high < 2.f) range = {{tried.high, turn > 1 ? 2.f : tried.high * 1.25f}, false};
      return NOT_FOUND;
    }
    // In two steps, all columns that top-k keeps must be listed, except ties.
    const bool in_two_steps = requested.top_k_first && !by_total && known == 0;
    if (list.count > CANDIDATES) {
      const int part = min(int(min(shared.listed, shared.fitting)), RETRY_SAMPLE);
      if (part > 0) range = NarrowToList(list, part, tried, in_two_steps, count, above, limits, shared);
      return NOT_FOUND;
    }
    const int searches = in_two_steps ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) limits = {UNLIMITED, QuantaLimitOf(requested.top_p, result.kept_quanta)};
      if (list.count > 0) {
        result = FindInList(list, {result.key, high}, count, above, limits, shared.bins, shared.scan);
      } else {
        result.kept_quanta = above;
      }
      bool is_reached = count + list.count >= limits.count || result.kept_quanta >= limits.quanta;
      if (is_reached && tried.has_ties) {  // the limit is reached above the ties
        range = {{FromBits(low + 1), tried.high}, false};
        if (search == 1 && threadIdx.x == 0) shared.known = limits.quanta;
        return NOT_FOUND;
      }
      if (!is_reached) {
        result = {low, result.kept_quanta + of_ties};
        is_reached = uint64_t{count} + list.count + tied >= limits.count || result.kept_quanta >= limits.quanta;
      }
      if (!is_reached && low > 1) {  // the threshold is below the range
        range = {{turn > 1 ? FromBits(1) : tried.low * 0.8f, in_two_steps ? tried.high : tried.low}, false};
        return NOT_FOUND;
      }
      __syncthreads();
    }
  }
  return IsDrawable(result) ? DrawFromList(source, list, result, shared) : NOT_FOUND;
}

/// Estimate a range from a fine look at a sample.
__device__ __forceinline__ TiedRange TightRange(const SegmentSource& source, OnePassShared& shared) {
  const RequestedFilter requested = shared.requested;
  const bool by_count = requested.count != UNLIMITED, by_mass = requested.by_mass || requested.ByTotal();
  const TightLimits limits{
      {float(requested.count), by_mass ? 1.f - requested.top_p : -1.f}, CANDIDATES - CANDIDATES / 8, RETRY_DEVIATIONS};
  const TightBounds bounds = FindTightBounds<false>(source.row, source.vocab, limits, shared.tight);
  const bool is_open = bounds.high >= BELOW_TWO || (requested.top_k_first && by_count);
  return {{FromBits(bounds.low), is_open ? 2.f : FromBits(bounds.high + 1)}, bounds.has_ties};
}

// The steps of SampleRetry; shared->next is the range. Separate functions, so that no step runs out of registers
// because of another: spilled values are slow to load, since cluster barriers flush the L1 cache.

inline __device__ __noinline__ void RetryScan(SegmentSource source, OnePassShared* shared) {
  const TiedRange range = TightRange(source, *shared);
  if (threadIdx.x == 0) shared->next = range;
}

inline __device__ __noinline__ void RetryList(SegmentSource source, OnePassShared* shared) {
  const TiedRange range = shared->next;
  if (shared->requested.ByTotal()) {
    CollectCandidates<true, true>(source, range, range.Tie(), *shared);
  } else {
    CollectCandidates<false, true>(source, range, range.Tie(), *shared);
  }
}

inline __device__ __noinline__ int RetryDraw(SegmentSource source, int turn, OnePassShared* shared) {
  TiedRange range = shared->next;
  const int column = DrawTied(source, turn, range, *shared);
  if (column != NOT_FOUND || turn == RETRY_TURNS) range.low = 0.f;
  __syncthreads();
  if (threadIdx.x < ptx::ClusterSize()) *ptx::InBlock(&shared->next, threadIdx.x) = range;
  return column;
}

/// Retry after SampleOnePass, by all blocks; the leader has the random bits. `tried` is the range that SampleOnePass
/// listed, if any. Returns what SampleOnePass returns. Arguments are copies, so that callers need not keep theirs in
/// memory.
inline __device__ __noinline__ int SampleRetry(SegmentSource source, WeightRange tried, OnePassShared* shared) {
  const bool is_leader = ptx::ClusterRank() == 0;
  int turn = tried.low > 0.f ? 0 : 1;
  __syncthreads();
  if (source.vocab < SAMPLE_PIECE) {  // a sample would read beyond the row
    return is_leader ? SearchAndDraw(source, shared->requested, shared->random, &shared->scan, &shared->leader)
                     : ELSEWHERE;
  }
  if (threadIdx.x == 0) shared->next = {tried, false}, shared->known = 0;
  if (turn > 0) RetryScan(source, shared);
  ptx::ClusterSync();
#pragma unroll 1
  for (;; ++turn) {  // ends after RETRY_TURNS, when RetryDraw names no further range
    if (turn > 0) {
      RetryList(source, shared);
      if (!is_leader) SendList(*shared);
    }
    ptx::ClusterSync();
    int column = ELSEWHERE;
    if (is_leader) column = RetryDraw(source, turn, shared);
    if (threadIdx.x == 0) shared->Start();
    ptx::ClusterSync();
    if (shared->next.low != 0.f) continue;
    if (column != NOT_FOUND) return column;
    return SearchAndDraw(source, shared->requested, shared->random, &shared->scan, &shared->leader);
  }
}

}  // namespace sampling
}  // namespace flashinfer
