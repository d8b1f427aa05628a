// SPDX-License-Identifier: Apache-2.0
// Draws that one block makes from a row it reads again and again, whatever the filter (definitions: sampling.h): what
// is left to do where a list was too short. Nine bits of the threshold a turn, then the masses of segments.
#pragma once
#include "sampling_rank.cuh"
#include "sampling_segment.cuh"

namespace flashinfer {
namespace sampling {

constexpr int LEADER_BINS = 2 * RANK_THREADS;
constexpr int LEADER_SEGMENTS = RANK_THREADS;  // of a row
constexpr int LEADER_VECTORS = 8;              // that a lane loads before it uses the first
constexpr int LEADER_COLUMNS = LEADER_VECTORS * WARP_COLUMNS;

struct LeaderShared {
  unsigned long long quanta[LEADER_BINS];
  uint64_t segment_mass[LEADER_SEGMENTS];
  uint32_t counts[LEADER_BINS];
  unsigned long long quanta_above;
  uint64_t target;
  uint32_t count_above;
  int32_t bin, segment;
};

/// What a filter asks of a row.
struct Asked {
  uint64_t count;  // fewer columns than this are above one that is kept
  float top_p;
  bool by_mass;
  bool top_k_first;  // top_p is of the columns that top-k keeps
};

/// Four columns from i on; 0 past the end.
__device__ __forceinline__ void LoadGroup(const float* row, int vocab, int i, bool aligned, float (&x)[4]) {
  if (aligned && i + 4 <= vocab) {
    LoadFloats(row + i, x);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = i + e < vocab ? row[i + e] : 0.f;
  }
}

struct Leader {
  const float* row;
  int vocab;
  bool aligned;
  int emax;
  Scale scale;
  RankShared& rank;
  LeaderShared& shared;

  __device__ __forceinline__ Leader(const float* row, int vocab, uint32_t largest, RankShared& rank,
                                    LeaderShared& shared)
      : row(row),
        vocab(vocab),
        aligned(reinterpret_cast<uintptr_t>(row) % 16 == 0),
        emax(BiasedExponent(FromBits(largest))),
        scale(emax),
        rank(rank),
        shared(shared) {}

  /// f(x) for each group of four columns from `begin` to `end`, a multiple of LEADER_COLUMNS apart, by one warp.
  template <typename F>
  __device__ __forceinline__ void ForEach(int begin, int end, const F& f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += LEADER_COLUMNS) {
      float x[LEADER_VECTORS][4];
#pragma unroll
      for (int j = 0; j < LEADER_VECTORS; ++j) {
        LoadGroup(row, vocab, base + j * WARP_COLUMNS + threadIdx.x % 32 * 4, aligned, x[j]);
      }
#pragma unroll
      for (int j = 0; j < LEADER_VECTORS; ++j) f(x[j]);
    }
  }

  /// Narrow [low, high] down to the bin that the limits are reached in. Returns whether `low` is the threshold; `kept`
  /// are the quanta from there on.
  __device__ __forceinline__ bool Narrow(uint32_t& low, uint32_t& high, const RankLimits& limits, uint64_t& kept) {
    const int thread = threadIdx.x, warp = thread / 32;
    const int shift = max(0, 23 - __clz(high - low));  // 9 bits
    __syncthreads();
    for (int i = thread; i < LEADER_BINS; i += RANK_THREADS) shared.counts[i] = 0, shared.quanta[i] = 0;
    if (thread == 0) shared.count_above = 0, shared.quanta_above = 0, shared.bin = -1;
    __syncthreads();
    uint64_t count = 0, quanta = 0;
#pragma unroll 1
    for (int begin = warp * LEADER_COLUMNS; begin < vocab; begin += RANK_WARPS * LEADER_COLUMNS) {
      ForEach(begin, begin + LEADER_COLUMNS, [&](const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t key = Bits(Positive(x[e]));
          if (key < low) continue;
          const uint32_t quantum = QuantumOf(x[e], scale);
          if (key > high) {
            ++count, quanta += quantum;
          } else {
            atomicAdd(shared.counts + ((high - key) >> shift), 1u);
            atomicAdd(shared.quanta + ((high - key) >> shift), static_cast<unsigned long long>(quantum));
          }
        }
      });
    }
    count = WarpSum(count), quanta = WarpSum(quanta);
    if (thread % 32 == 0) {
      atomicAdd(&shared.count_above, uint32_t(count));
      atomicAdd(&shared.quanta_above, static_cast<unsigned long long>(quanta));
    }
    __syncthreads();
    uint64_t columns = uint64_t(shared.counts[2 * thread]) + shared.counts[2 * thread + 1];
    uint64_t mass = shared.quanta[2 * thread] + shared.quanta[2 * thread + 1];
    RankScan(columns, mass, rank);
    columns += shared.count_above, mass += shared.quanta_above;
    const auto is_reached = [&] { return columns >= limits.count || mass >= limits.quanta; };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool before = is_reached();
      columns += shared.counts[2 * thread + i], mass += shared.quanta[2 * thread + i];
      if (is_reached() && !before) shared.bin = 2 * thread + i, rank.quanta_through = mass;
    }
    if (thread == RANK_THREADS - 1 && !is_reached()) rank.quanta_through = mass;
    __syncthreads();
    kept = rank.quanta_through;
    if (shared.bin < 0) return true;  // all are kept
    high -= uint32_t(shared.bin) << shift;
    const uint32_t width = (1u << shift) - 1;
    if (high - low > width) low = high - width;
    return shift == 0;
  }

  /// Draw a column from `threshold` on; found(-1) if there is none.
  template <typename Found>
  __device__ __forceinline__ void Draw(float threshold, uint64_t random, const Found& found) {
    const int thread = threadIdx.x, warp = thread / 32;
    const int columns =
        (vocab + LEADER_COLUMNS * LEADER_SEGMENTS - 1) / (LEADER_COLUMNS * LEADER_SEGMENTS) * LEADER_COLUMNS;
    const auto mass_of = [&](float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = Positive(x[e]) >= threshold ? Positive(x[e]) : 0.f;
      return MassOf(Sum4(x[0], x[1], x[2], x[3]), emax);
    };
    shared.segment_mass[thread] = 0;
    __syncthreads();
#pragma unroll 1
    for (int segment = warp; segment * columns < vocab; segment += RANK_WARPS) {
      uint64_t mass = 0;
      ForEach(segment * columns, min((segment + 1) * columns, vocab), [&](float (&x)[4]) { mass += mass_of(x); });
      mass = WarpSum(mass);
      if (thread % 32 == 0) shared.segment_mass[segment] = mass;
    }
    __syncthreads();
    const uint64_t mass = shared.segment_mass[thread];
    uint64_t before = mass, unused = 0;
    RankScan(before, unused, rank);
    if (thread == RANK_THREADS - 1) rank.quanta_before = before + mass;
    __syncthreads();
    const uint64_t total = rank.quanta_before;
    if (total == 0) {
      if (thread == 0) found(-1);
      return;
    }
    const uint64_t target = TargetOf(random, total);
    if (target > before && target <= before + mass) shared.segment = thread, shared.target = target - before;
    __syncthreads();
    uint64_t wanted = shared.target;
    const int begin = shared.segment * columns, end = min(begin + columns, vocab);
#pragma unroll 1
    for (int base = begin; base < end; base += RANK_THREADS * 4) {
      const int i = base + thread * 4;
      float x[4];
      LoadGroup(row, end, i, aligned, x);
      const uint64_t own = mass_of(x);
      before = own, unused = 0;
      RankScan(before, unused, rank);
      const bool is_mine = wanted > before && wanted <= before + own;
      if (is_mine) found(i + ColumnOf(x, wanted - before, emax));
      if (thread == RANK_THREADS - 1) rank.quanta_before = before + own;
      if (__syncthreads_or(is_mine)) return;
      wanted -= rank.quanta_before;
      __syncthreads();
    }
  }

  template <typename Found>
  __device__ __noinline__ void SearchAndDraw(const Asked& asked, uint32_t largest, uint64_t random,
                                             const Found& found) {
    uint32_t low = 1, high = max(largest, 1u);
    RankLimits limits{asked.count, asked.by_mass ? QuantaLimit(asked.top_p, emax) : UNLIMITED};
    bool is_first = asked.top_k_first;
#pragma unroll 1
    for (int turn = 0; turn < 12; ++turn) {  // 4 and 4 at most
      uint64_t kept;
      if (!Narrow(low, high, limits, kept)) continue;
      if (!is_first) break;
      is_first = false;
      limits = {UNLIMITED, QuantaLimitOf(asked.top_p, kept)};
      high = max(largest, 1u);
    }
    Draw(FromBits(low), random, found);
  }
};

}  // namespace sampling
}  // namespace flashinfer
