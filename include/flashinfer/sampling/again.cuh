// SPDX-License-Identifier: Apache-2.0
// Draws from rows that near.cuh has no range for, or no good one: they are flat, or many columns are equal. The part that
// was listed tells a better range, or a closer look at a sample (tight.cuh); columns equal to its lower end are counted
// instead of listed where they are many. If no range does, the leader searches the row.
#pragma once
#include "list.cuh"

namespace flashinfer {
namespace sampling {

constexpr int AGAIN_TURNS = 5;            // ranges that are tried
constexpr int AGAIN_SAMPLE = 3072;        // listed columns that tell the next one, where not all are listed
constexpr float AGAIN_DEVIATIONS = 2.5f;  // standard deviations that a range is wide at least, if columns are many

/// How many of a list are equal to a key.
__device__ __forceinline__ int CountEqual(const NearList<>& list, uint32_t key, NearBins& bins) {
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

/// What to try where only a part of the columns within a range was listed: the range is narrowed. Where that does not
/// help, the key at which the part reaches its share of the limits, if many columns have it; or a key above which the list
/// should do.
__device__ __forceinline__ TiedRange NarrowToList(const NearList<>& list, int part, const TiedRange& tried,
                                                  bool in_two_steps, uint32_t count, uint64_t quanta,
                                                  const Limit& limits, NearShared& shared) {
  const NearList<> sample{shared, part, part};
  const float all = float(list.count), share = float(part) / all;
  const uint32_t low = Bits(tried.low), high = Bits(tried.high) - 1;
  TiedRange range = tried;
  if (!in_two_steps) {
    float expected;
    const Range narrow = Narrow(sample, all, low, high, count, quanta, limits, expected, shared.bins, shared.scan);
    const bool is_one = Bits(narrow.low) + 1 == Bits(narrow.high);
    range = {narrow, is_one || (tried.has_ties && narrow.low == tried.low)};
    if (expected <= fmaxf(0.5f * all, float(NEAR_LIST)) || range.has_ties) return range;
    __syncthreads();
    const auto share_of = [&](uint64_t limit, uint64_t above) {
      return limit == UNLIMITED ? UNLIMITED : uint64_t(float(limit - above) * share) + 1;
    };
    const Limit of_sample{share_of(limits.count, count), share_of(limits.quanta, quanta)};
    const uint32_t key = FindNear(sample, low, high, 0, 0, of_sample, shared.bins, shared.scan).key;
    const int equal = CountEqual(sample, key, shared.bins);
    if (float(equal) > 0.5f * share * float(NEAR_LIST)) return {{FromBits(key), FromBits(key + 1)}, true};
  }
  const uint64_t most = max(uint64_t(part) * (NEAR_LIST - NEAR_LIST / 4) / list.count, uint64_t{1});
  __syncthreads();
  const Threshold last =
      FindNear(sample, Bits(range.low), Bits(range.high) - 1, 0, 0, {most, UNLIMITED}, shared.bins, shared.scan);
  return {{FromBits(last.key), range.high}, true};
}

/// What DrawNear does, of a range with ties; or the range becomes that to be tried next, from 0 on if there is none.
__device__ __forceinline__ int DrawTied(const SegmentSource& source, int turn, TiedRange& range, NearShared& shared) {
  const Asked asked = shared.asked;
  const uint64_t known = shared.known;
  // SampleNear's list is of all warps of wide blocks, too.
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * (turn == 0 ? blockDim.x / 32 : TOP_WARPS);
  const bool by_total = asked.ByTotal();
  const TiedRange tried = range;
  const NearList<> list{shared, int(shared.listed), int(shared.listed + shared.sent)};
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
  Limit limits{asked.count, asked.by_mass ? LimitOfProbs(asked.top_p) : UNLIMITED};
  if (by_total) limits.quanta = LimitOfProbs(asked.top_p);  // about
  if (known != 0) limits = {UNLIMITED, known};
  if (by_total && list.count <= NEAR_LIST) {
    limits.quanta = QuantaLimitOf(asked.top_p, above + WarpSum(below + list.QuantaOfLane()) + of_ties);
  }
  Threshold result{low, above};
  range.low = 0.f;
  if (limits.count != UNLIMITED || limits.quanta != UNLIMITED) {
    if (count >= limits.count || above >= limits.quanta) {  // the threshold is above
      if (tried.high < 2.f) range = {{tried.high, turn > 1 ? 2.f : tried.high * 1.25f}, false};
      return NOT_NEAR;
    }
    // In two steps, all that top-k keeps has to be listed, but for ties.
    const bool in_two_steps = asked.top_k_first && !by_total && known == 0;
    if (list.count > NEAR_LIST) {
      const int part = min(int(min(shared.listed, shared.fitting)), AGAIN_SAMPLE);
      if (part > 0) range = NarrowToList(list, part, tried, in_two_steps, count, above, limits, shared);
      return NOT_NEAR;
    }
    const int searches = in_two_steps ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) limits = {UNLIMITED, QuantaLimitOf(asked.top_p, result.kept_quanta)};
      if (list.count > 0) {
        result = FindNear(list, result.key, high, count, above, limits, shared.bins, shared.scan);
      } else {
        result.kept_quanta = above;
      }
      bool is_reached = count + list.count >= limits.count || result.kept_quanta >= limits.quanta;
      if (is_reached && tried.has_ties) {  // ties are not kept
        range = {{FromBits(low + 1), tried.high}, false};
        if (search == 1 && threadIdx.x == 0) shared.known = limits.quanta;
        return NOT_NEAR;
      }
      if (!is_reached) {
        result = {low, result.kept_quanta + of_ties};
        is_reached = uint64_t{count} + list.count + tied >= limits.count || result.kept_quanta >= limits.quanta;
      }
      if (!is_reached && low > 1) {  // it is below
        range = {{turn > 1 ? FromBits(1) : tried.low * 0.8f, in_two_steps ? tried.high : tried.low}, false};
        return NOT_NEAR;
      }
      __syncthreads();
    }
  }
  return IsDrawable(result) ? DrawListed(source, list, result, shared) : NOT_NEAR;
}

/// A range from a closer look at a sample.
__device__ __forceinline__ TiedRange TightRange(const SegmentSource& source, NearShared& shared) {
  const Asked asked = shared.asked;
  const bool by_count = asked.count != UNLIMITED, by_mass = asked.by_mass || asked.ByTotal();
  const TightLimits limits{float(asked.count), by_mass ? 1.f - asked.top_p : -1.f, NEAR_LIST - NEAR_LIST / 8,
                           AGAIN_DEVIATIONS};
  const TightBounds bounds = FindTightBounds<false>(source.row, source.vocab, limits, shared.tight);
  const bool is_open = bounds.high >= TIGHT_TOP || (asked.top_k_first && by_count);
  return {{FromBits(bounds.low), is_open ? 2.f : FromBits(bounds.high + 1)}, bounds.has_ties};
}

// The steps, with `next` as the range: functions of their own, for none of them to do without registers because of another.
// What is moved to memory is loaded slowly, as barriers of a cluster empty the L1 cache.

inline __device__ __noinline__ void LookAgain(SegmentSource source, NearShared* shared) {
  const TiedRange range = TightRange(source, *shared);
  if (threadIdx.x == 0) shared->next = range;
}

inline __device__ __noinline__ void ListAgain(SegmentSource source, NearShared* shared) {
  const TiedRange range = shared->next;
  if (shared->asked.ByTotal()) {
    ListNear<true, true>(source, range, range.Tie(), *shared);
  } else {
    ListNear<false, true>(source, range, range.Tie(), *shared);
  }
}

inline __device__ __noinline__ int DrawAgain(SegmentSource source, int turn, NearShared* shared) {
  TiedRange range = shared->next;
  const int column = DrawTied(source, turn, range, *shared);
  if (column != NOT_NEAR || turn == AGAIN_TURNS) range.low = 0.f;
  __syncthreads();
  if (threadIdx.x < ptx::ClusterSize()) *ptx::InBlock(&shared->next, threadIdx.x) = range;
  return column;
}

/// SampleNear's result, by all blocks, of which the leader has the random bits: `tried` is what SampleNear has listed, if
/// anything. Arguments are copies, so that callers need not keep theirs in memory.
inline __device__ __noinline__ int SampleAgain(SegmentSource source, Range tried, NearShared* shared) {
  const bool is_leader = ptx::ClusterRank() == 0;
  int turn = tried.low > 0.f ? 0 : 1;
  __syncthreads();
  if (threadIdx.x == 0) shared->next = {tried, false}, shared->known = 0;
  if (turn > 0) LookAgain(source, shared);
  ptx::ClusterSync();
#pragma unroll 1
  for (;; ++turn) {  // up to AGAIN_TURNS, after which DrawAgain names no range
    if (turn > 0) {
      ListAgain(source, shared);
      if (!is_leader) SendList(*shared);
    }
    ptx::ClusterSync();
    int column = ELSEWHERE;
    if (is_leader) column = DrawAgain(source, turn, shared);
    if (threadIdx.x == 0) shared->Start();
    ptx::ClusterSync();
    if (shared->next.low != 0.f) continue;
    if (column != NOT_NEAR) return column;
    return SearchAndDraw(source, shared->asked, shared->random, &shared->scan, &shared->leader);
  }
}

}  // namespace sampling
}  // namespace flashinfer
