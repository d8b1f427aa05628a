// SPDX-License-Identifier: Apache-2.0
// A draw from what top-k and top-p keep of a row of probabilities, in one read of the row (definitions and parameters:
// sampling.h). A cluster of blocks, or one block where rows are many:
//   1. each block guesses a range of the threshold from a sample (guess.cuh);
//   2. warps read chunks of columns, add up the quanta from the range on, and list what is within;
//   3. the leading block finds the threshold in the list, adds what is kept of the list to the chunks, draws a chunk,
//      and reads that chunk again to find the column.
// Where the range does not hold the threshold, or the list does not hold the range, what is known by then makes for a
// better range. If that does not do either, the leader searches the row.
#pragma once
#include "../ptx/prefetch.cuh"
#include "leader.cuh"

namespace flashinfer {
namespace sampling {

constexpr int NEAR_CLUSTER = 16;
constexpr int NEAR_WARPS = NEAR_CLUSTER * TOP_WARPS;
constexpr int NEAR_CHUNKS = int(MAX_VOCAB / SEGMENT);  // at most, of a row
constexpr int NEAR_LIST = 6144;                        // columns; four blocks fit an SM
constexpr int NEAR_BINS = 2 * TOP_THREADS;
constexpr int NEAR_FEW = 32;
constexpr int NEAR_TURNS = 3;                   // ranges that are tried
constexpr uint64_t NEAR_QUANTA = ~uint32_t{0};  // of what is kept: then no column saturates, and sums fit 32 bits

struct NearBins {
  uint32_t sums[3][NEAR_BINS];  // counts, and both halves of quanta
  uint32_t few[NEAR_FEW];
  int32_t bin, last_bin;
  uint32_t count_few, count_before, count_within;
  uint64_t quanta_before, quanta_through;
};

struct NearShared {
  ScanShared scan;
  union {
    GuessShared guess;
    NearBins bins;
  };
  union {
    struct {  // from the front on what this block lists, from the back on what others send the leader
      uint32_t keys[NEAR_LIST];
      uint16_t chunks[NEAR_LIST];
    };
    LeaderShared leader;
  };
  uint32_t listed, sent;  // also what did not fit
  uint32_t fitting;       // of this block's
  uint32_t begin;
  Range next;  // what the leader wants to be tried; from 0 on if nothing
  // Of the leader: what all warps tell it.
  uint32_t chunk_quanta[NEAR_CHUNKS];
  uint64_t quanta_above[NEAR_WARPS], quanta_below[NEAR_WARPS];
  uint32_t count_above[NEAR_WARPS];
  uint64_t random;
};

/// Bring a chunk of a warp into L2.
__device__ __forceinline__ void PrefetchChunk(const SegmentSource& source, int chunk) {
  const int begin = chunk * SEGMENT;
  if (threadIdx.x % 32 == 0 && begin + 4 <= source.vocab && source.aligned) {
    ptx::PrefetchL2(source.row + begin, min(SEGMENT, source.vocab - begin) / 4 * 16);
  }
}

/// Step 2. BELOW: the leader wants to know the quanta of the whole row.
template <bool BELOW>
__device__ __forceinline__ void ListNear(const SegmentSource& source, const Range& range, NearShared& shared) {
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * TOP_WARPS;
  const int mine = ptx::ClusterRank() * TOP_WARPS + threadIdx.x / 32, chunks = source.Count();
  constexpr int COUNT = 40;  // bits of the quanta; the rest counts columns
  const Scale scale(ONE);
  uint32_t* const chunk_quanta = ptx::InBlock(shared.chunk_quanta, 0);
  uint64_t above = 0, below = 0;
  uint32_t count = 0;
#pragma unroll 1
  for (int chunk = mine; chunk < chunks; chunk += warps) {
    float x[VECTORS][4];
    source.Load<true>(chunk, 0.f, x);
    if (warps > TOP_WARPS) PrefetchChunk(source, chunk + warps);  // few rows: too little is loaded at a time
    uint64_t sum = 0;
    uint32_t near = 0;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = x[j][e];
        if (value >= range.high) {
          sum += QuantumOf(value, scale) + (uint64_t{1} << COUNT);
        } else if (value >= range.low) {
          near |= 1u << (j * 4 + e);
        } else if constexpr (BELOW) {
          below += QuantumOf(Positive(value), scale);
        }
      }
    }
    const uint64_t quanta = WarpMass(sum & ((uint64_t{1} << COUNT) - 1));
    above += quanta;
    count += ptx::ReduceAdd(uint32_t(sum >> COUNT));
    if (lane == 0) chunk_quanta[chunk] = uint32_t(quanta);
    if (__any_sync(ALL_LANES, near != 0)) {
      const uint32_t own = __popc(near), through = WarpInclusiveScan(own), all = __shfl_sync(ALL_LANES, through, 31);
      uint32_t begin = 0;
      if (lane == 0) begin = atomicAdd(&shared.listed, all);
      begin = __shfl_sync(ALL_LANES, begin, 0);
      if (begin + all > NEAR_LIST) {
        if (lane == 0) atomicMin(&shared.fitting, begin);
        continue;
      }
      uint32_t* key = shared.keys + begin + through - own;
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (near >> (j * 4 + e) & 1) *key++ = Bits(x[j][e]);
        }
      }
#pragma unroll 1
      for (uint32_t i = lane; i < all; i += 32) shared.chunks[begin + i] = uint16_t(chunk);
    }
  }
  if constexpr (BELOW) below = WarpSum(below);
  if (lane == 0) {
    ptx::InBlock(shared.quanta_above, 0)[mine] = above;
    ptx::InBlock(shared.count_above, 0)[mine] = count;
    if constexpr (BELOW) ptx::InBlock(shared.quanta_below, 0)[mine] = below;
  }
}

/// Send the list of this block to the leader.
__device__ __forceinline__ void SendList(NearShared& shared) {
  const int thread = threadIdx.x;
  __syncthreads();
  const uint32_t count = shared.listed;
  if (thread == 0) shared.begin = atomicAdd(ptx::InBlock(&shared.sent, 0), count);
  __syncthreads();
  const uint32_t begin = shared.begin;
  if (begin + count > NEAR_LIST) return;
  uint32_t* const keys = ptx::InBlock(shared.keys, 0) + (NEAR_LIST - count - begin);
  uint16_t* const chunks = ptx::InBlock(shared.chunks, 0) + (NEAR_LIST - count - begin);
#pragma unroll 1
  for (int i = thread; i < int(count); i += TOP_THREADS) {
    keys[i] = shared.keys[i];
    chunks[i] = shared.chunks[i];
  }
}

struct Threshold {
  uint32_t key;          // the smallest that is kept
  uint64_t kept_quanta;  // of all that are kept
};

/// What is listed, for the leader.
struct NearList {
  const NearShared& shared;
  int front, count;  // the first `front` are the leader's own

  __device__ __forceinline__ int At(int i) const { return i < front ? i : i + NEAR_LIST - count; }

  /// f(keys, places) of four at a time, whose steps need not wait for each other; keys of 0 are none. Lanes are far
  /// from each other: neighbours in the list are of one chunk, and atomic additions to one place are made one by one.
  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
    const int each = (count + 31) / 32 | 1, first = threadIdx.x % 32 * each;  // odd: in different banks
#pragma unroll 1
    for (int base = threadIdx.x / 32; base < each; base += 4 * TOP_WARPS) {
      uint32_t key[4];
      int place[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = base + j * TOP_WARPS;
        const bool is_any = i < each && first + i < count;
        place[j] = At(is_any ? first + i : 0);
        key[j] = is_any ? shared.keys[place[j]] : 0;
      }
      f(key, place);
    }
  }
};

/// Columns and quanta of the list within [low, high], by bins downwards from `high`: those of bins before this thread's
/// two, and the quanta of these.
__device__ __forceinline__ void FillBins(const NearList& list, uint32_t low, uint32_t high, int shift,
                                         uint64_t& columns, uint64_t& before, uint64_t (&own)[2], NearBins& bins,
                                         ScanShared& scan) {
  const int thread = threadIdx.x;
  const Scale scale(ONE);
  const bool is_light = high < Bits(0x1p-12f);  // quanta of a list are below 2^32 in all
#pragma unroll 1
  for (int i = thread; i < NEAR_BINS; i += TOP_THREADS) bins.sums[0][i] = bins.sums[1][i] = bins.sums[2][i] = 0;
  if (thread == 0) bins.bin = -1, bins.last_bin = NEAR_BINS, bins.count_few = 0;
  __syncthreads();
  list.ForEach([&](const uint32_t (&key)[4], const int (&)[4]) {
    uint32_t bin[4], quantum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bin[j] = key[j] >= low && key[j] <= high ? (high - key[j]) >> shift : NEAR_BINS;
      quantum[j] = QuantumOf(FromBits(key[j]), scale);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (bin[j] != NEAR_BINS) {
        atomicAdd(bins.sums[0] + bin[j], 1u);
        atomicAdd(bins.sums[1] + bin[j], is_light ? quantum[j] : quantum[j] & 0xFFFFu);
        if (!is_light) atomicAdd(bins.sums[2] + bin[j], quantum[j] >> 16);
      }
    }
  });
  __syncthreads();
  constexpr int COUNT = 48;  // bits of quanta; the rest counts columns
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = bins.sums[1][2 * thread + i] + (uint64_t{bins.sums[2][2 * thread + i]} << 16);
    sum += own[i] + (uint64_t{bins.sums[0][2 * thread + i]} << COUNT);
  }
  sum = BlockBefore(sum, scan);
  columns = sum >> COUNT, before = sum & ((uint64_t{1} << COUNT) - 1);
}

/// A narrower range, where only a part of the columns within could be listed: that part is a sample.
__device__ __forceinline__ Range Narrow(const NearList& part, float all, uint32_t low, uint32_t high, uint32_t count,
                                        uint64_t quanta, const Limit& limits, NearBins& bins, ScanShared& scan) {
  const int thread = threadIdx.x, shift = max(0, 23 - __clz(high - low));
  uint64_t columns, before, own[2];
  FillBins(part, low, high, shift, columns, before, own, bins, scan);
  const float each = all / float(part.count), heaviest = float(QuantumOf(FromBits(high), Scale(ONE)));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    columns += bins.sums[0][2 * thread + i], before += own[i];
    // What is missing, by the end of the bin, of either limit.
    const float few = float(columns), light = float(before);
    const float fewer = limits.count == UNLIMITED ? INFINITY : float(limits.count) - float(count) - each * few;
    const float lighter = limits.quanta == UNLIMITED ? INFINITY : float(limits.quanta - quanta) - each * light;
    const float of_count = each * each * few, of_quanta = each * each * light * heaviest;
    if (IsCertain(-fewer, of_count) || IsCertain(-lighter, of_quanta)) atomicMin(&bins.last_bin, 2 * thread + i);
    if (IsCertain(fewer, of_count) && IsCertain(lighter, of_quanta)) atomicMax(&bins.bin, 2 * thread + i);
  }
  __syncthreads();
  const uint32_t top = high - (uint32_t(bins.bin + 1) << shift), width = uint32_t(bins.last_bin + 1) << shift;
  return {FromBits(bins.last_bin == NEAR_BINS || width > high - low ? low : high - width + 1), FromBits(top + 1)};
}

/// The smallest key of the list within [low, high] that is kept, and the quanta from there on; `count` and `quanta` are
/// of columns above `high`, and within the limits. Histograms narrow it down to a few keys, which every warp ranks.
__device__ __forceinline__ Threshold FindNear(const NearList& list, uint32_t low, uint32_t high, uint32_t count,
                                              uint64_t quanta, const Limit& limits, NearBins& bins, ScanShared& scan) {
  const int thread = threadIdx.x, lane = thread % 32;
  const Scale scale(ONE);
  uint32_t within;
#pragma unroll 1
  while (true) {
    const int shift = max(0, 23 - __clz(high - low));  // 9 bits
    uint64_t columns, before, own[2];
    FillBins(list, low, high, shift, columns, before, own, bins, scan);
    columns += count, before += quanta;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t mine = bins.sums[0][2 * thread + i];
      const bool starts = columns < limits.count && before < limits.quanta;
      if (starts && (columns + mine >= limits.count || before + own[i] >= limits.quanta)) {
        bins.bin = 2 * thread + i, bins.count_before = uint32_t(columns), bins.count_within = mine;
        bins.quanta_before = before, bins.quanta_through = before + own[i];
      } else if (starts && 2 * thread + i == NEAR_BINS - 1) {
        bins.quanta_through = before + own[i];  // the limits are not reached
      }
      columns += mine, before += own[i];
    }
    __syncthreads();
    if (bins.bin < 0) return {low, bins.quanta_through};
    count = bins.count_before, quanta = bins.quanta_before, within = bins.count_within;
    high -= uint32_t(bins.bin) << shift;
    if (shift == 0) return {high, bins.quanta_through};
    low = max(low, high - ((1u << shift) - 1));
    if (within <= NEAR_FEW) break;
    __syncthreads();
  }

  list.ForEach([&](const uint32_t (&key)[4], const int (&)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] >= low && key[j] <= high) bins.few[atomicAdd(&bins.count_few, 1u)] = key[j];
    }
  });
  __syncthreads();
  const uint32_t key = lane < int(within) ? bins.few[lane] : 0, quantum = QuantumOf(FromBits(key), scale);
#pragma unroll 1
  for (int j = 0; j < int(within); ++j) {
    const uint32_t other = __shfl_sync(ALL_LANES, key, j), of_other = __shfl_sync(ALL_LANES, quantum, j);
    if (other > key) ++count, quanta += of_other;
  }
  const bool is_kept = key != 0 && count < limits.count && quanta < limits.quanta;
  const uint32_t threshold = ptx::ReduceMin(is_kept ? key : ~uint32_t{0});
  // Whoever has the threshold knows what is above it.
  const uint32_t equal = __ballot_sync(ALL_LANES, key == threshold);
  return {threshold, __shfl_sync(ALL_LANES, quanta + uint64_t{quantum} * __popc(equal), __ffs(equal) - 1)};
}

constexpr int NOT_NEAR = -3;

/// Step 3, by the leader: the column for one thread, ELSEWHERE for the others. Or NOT_NEAR, and the range becomes that
/// to be tried next, from 0 on if there is none.
__device__ __forceinline__ int DrawNear(const SegmentSource& source, const Asked& asked, Range& range,
                                        NearShared& shared) {
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * TOP_WARPS;
  const bool by_total = asked.top_k_first && asked.count == UNLIMITED;
  const NearList list{shared, int(shared.listed), int(shared.listed + shared.sent)};
  uint64_t above = 0, below = 0;
  uint32_t count = 0;
#pragma unroll 1
  for (int w = lane; w < warps; w += 32) {
    above += shared.quanta_above[w], count += shared.count_above[w];
    if (by_total) below += shared.quanta_below[w];
  }
  above = WarpMass(above), count = ptx::ReduceAdd(count);
  const Scale scale(ONE);
  const auto quantum_of = [&](uint32_t key) { return QuantumOf(FromBits(key), scale); };
  const uint32_t low = Bits(range.low), high = Bits(range.high) - 1;
  Limit limits{asked.count, asked.by_mass ? LimitOfProbs(asked.top_p) : UNLIMITED};
  if (by_total) limits.quanta = LimitOfProbs(asked.top_p);  // about
  if (by_total && list.count <= NEAR_LIST) {
#pragma unroll 1
    for (int i = lane; i < list.count; i += 32) below += quantum_of(shared.keys[list.At(i)]);  // by every warp
    limits.quanta = QuantaLimitOf(asked.top_p, above + WarpSum(below));
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
      const NearList sample{shared, part, part};
      if (part > 0 && !in_two_steps) {
        range = Narrow(sample, float(list.count), low, high, count, above, limits, shared.bins, shared.scan);
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
  const uint64_t total = result.kept_quanta;
  const float threshold = FromBits(result.key);
  // Quanta are relative to 1 for certain, and none is more than 32 bits.
  if (total >= NEAR_QUANTA || !(total >= NEAR_QUANTA >> 4 || threshold >= 0x1p-24f)) return NOT_NEAR;

  list.ForEach([&](const uint32_t (&key)[4], const int (&place)[4]) {
    int chunk[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk[j] = shared.chunks[place[j]];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] >= result.key) atomicAdd(shared.chunk_quanta + chunk[j], quantum_of(key[j]));
    }
  });
  __syncthreads();
  // The chunk that holds the target, found by every warp: each lane sums up some.
  const int chunks = source.Count(), each = (chunks + 31) / 32, first = lane * each;
  uint32_t own = 0;
#pragma unroll 4
  for (int c = first; c < min(first + each, chunks); ++c) own += shared.chunk_quanta[c];
  const uint32_t through = WarpInclusiveScan(own);
  uint32_t target = uint32_t(TargetOf(shared.random, total));
  const int owner = __ffs(__ballot_sync(ALL_LANES, through >= target)) - 1;
  target -= __shfl_sync(ALL_LANES, through - own, owner);
  int chunk = owner * each;
  while (target > shared.chunk_quanta[chunk]) target -= shared.chunk_quanta[chunk++];
  const int begin = chunk * SEGMENT;
  return FindKept(source, begin, min(begin + SEGMENT, source.vocab), threshold, scale, target, shared.scan);
}

/// All steps: the column for one thread of the cluster, -1 if there is none; ELSEWHERE for the others. random() is 64
/// random bits.
template <typename Random>
__device__ __forceinline__ int SampleNear(const SegmentSource& source, const Asked& asked, const Random& random,
                                          NearShared& shared) {
  const int thread = threadIdx.x;
  const auto start = [&] {
    if (thread == 0) shared.listed = shared.sent = 0, shared.fitting = NEAR_LIST;
  };
  start();
  __syncthreads();
  ptx::ClusterArrive();
  Range range = GuessRange(source, asked, NEAR_LIST, shared.guess,
                           [&] { PrefetchChunk(source, ptx::ClusterRank() * TOP_WARPS + thread / 32); });
  ptx::ClusterWait();
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    if (asked.top_k_first && asked.count == UNLIMITED) {
      ListNear<true>(source, range, shared);
    } else {
      ListNear<false>(source, range, shared);
    }
    if (ptx::ClusterRank() != 0) {
      SendList(shared);
      ptx::ClusterSync();
      start();
      ptx::ClusterSync();  // the leader has decided
      range = shared.next;
      if (range.low == 0.f) return ELSEWHERE;
      continue;
    }
    if (thread == TOP_THREADS - 1) shared.random = random();
    ptx::ClusterSync();
    const int column = DrawNear(source, asked, range, shared);
    if (column != NOT_NEAR || turn == NEAR_TURNS) range.low = 0.f;
    if (thread < int(ptx::ClusterSize())) *ptx::InBlock(&shared.next, thread) = range;
    if (range.low == 0.f) {
      ptx::ClusterArrive();
      if (column != NOT_NEAR) return column;
      break;
    }
    __syncthreads();
    start();
    ptx::ClusterSync();
  }
  __syncthreads();
  return SearchAndDraw(source, asked, shared.random, &shared.scan, &shared.leader);
}

}  // namespace sampling
}  // namespace flashinfer
