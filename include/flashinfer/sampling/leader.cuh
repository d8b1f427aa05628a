// SPDX-License-Identifier: Apache-2.0
// Draws that one block makes from a row it reads again and again, whatever the filter (definitions: sampling.h): what
// is left to do where a guess was wrong. Nine bits of the threshold a turn, then the quanta of segments.
#pragma once
#include "guess.cuh"

namespace flashinfer {
namespace sampling {

constexpr int LEADER_BINS = 2 * TOP_THREADS;
constexpr int LEADER_SEGMENTS = TOP_THREADS;  // of a row
constexpr int LEADER_VECTORS = 8;             // that a lane loads before it uses the first
constexpr int LEADER_COLUMNS = LEADER_VECTORS * WARP_COLUMNS;

struct LeaderShared {
  uint32_t quanta[3][LEADER_BINS];  // in units of 1, 2^11 and 2^22, so that none overflows: see AddToBins
  uint64_t segment_quanta[LEADER_SEGMENTS];
  uint32_t counts[LEADER_BINS];
  unsigned long long quanta_above;
  uint64_t quanta_through;
  uint64_t target;
  uint32_t count_above;
  int32_t bin, segment;
};

/// Fewer columns, and less quanta, are above one that is kept.
struct Limit {
  uint64_t count, quanta;
};

/// The columns from `threshold` on of four, others 0; returns their quanta.
__device__ __forceinline__ uint64_t KeptQuanta(float threshold, const Scale& scale, float (&x)[4]) {
  uint64_t quanta = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    x[e] = x[e] >= threshold ? x[e] : 0.f;
    quanta += QuantumOf(x[e], scale);
  }
  return quanta;
}

constexpr int ELSEWHERE = -2;  // another thread has the column

/// The column from `begin` to `end` that unit `target` of the kept quanta belongs to, for one thread; ELSEWHERE for the
/// others. `threshold` is positive.
__device__ __forceinline__ int FindKept(const SegmentSource& source, int begin, int end, float threshold,
                                        const Scale& scale, uint64_t target, ScanShared& scan) {
  const int thread = threadIdx.x;
#pragma unroll 1
  for (int base = begin; base < end; base += TOP_THREADS * 4) {
    const int i = base + thread * 4;
    float x[4] = {};
    if (i < end) source.LoadFour(i, 0.f, x);
    const uint64_t own = KeptQuanta(threshold, scale, x);
    const uint64_t before = BlockBefore(own, scan);
    const bool is_mine = target > before && target <= before + own;
    if (thread == TOP_THREADS - 1) scan.total = before + own;
    if (__syncthreads_or(is_mine)) return is_mine ? i + ColumnOfQuanta(x, target - before, scale) : ELSEWHERE;
    target -= scan.total;
    __syncthreads();
  }
  return ELSEWHERE;
}

/// Add a column of each lane to its bin; LEADER_BINS is none. Lanes with one key do it together: additions to one place
/// are made one by one, and rows of few distinct values would take milliseconds. 64-bit ones are loops, which is why
/// quanta are in parts. The lower ones get up to 2^21 additions below 2^11, the upper one 2^31 altogether at most.
inline __device__ __noinline__ void AddToBins(uint32_t bin, uint32_t key, uint32_t quantum, LeaderShared* shared) {
  const uint32_t same = __match_any_sync(ALL_LANES, key);
  if (bin == LEADER_BINS || int(threadIdx.x % 32) != __ffs(same) - 1) return;
  const uint32_t count = __popc(same);
  const uint64_t quanta = uint64_t{count} * quantum;
  atomicAdd(shared->counts + bin, count);
  atomicAdd(shared->quanta[0] + bin, uint32_t(quanta) & 0x7FFu);
  atomicAdd(shared->quanta[1] + bin, uint32_t(quanta >> 11) & 0x7FFu);
  atomicAdd(shared->quanta[2] + bin, uint32_t(quanta >> 22));
}

struct Leader {
  const SegmentSource source;
  ScanShared& scan;
  LeaderShared& shared;
  uint32_t largest;
  int emax;
  Scale scale;

  __device__ __forceinline__ Leader(const SegmentSource& source, ScanShared& scan, LeaderShared& shared)
      : source(source),
        scan(scan),
        shared(shared),
        largest(Largest()),
        emax(ExponentOfProbs(FromBits(largest))),
        scale(emax) {}

  /// f(x) for each group of four columns from `begin` to `end`, a multiple of LEADER_COLUMNS apart, by one warp.
  template <typename F>
  __device__ __forceinline__ void ForEach(int begin, int end, const F& f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += LEADER_COLUMNS) {
      float x[LEADER_VECTORS][4];
#pragma unroll
      for (int j = 0; j < LEADER_VECTORS; ++j) {
        source.LoadFour(base + j * WARP_COLUMNS + threadIdx.x % 32 * 4, 0.f, x[j]);
      }
#pragma unroll
      for (int j = 0; j < LEADER_VECTORS; ++j) f(x[j]);
    }
  }

  /// The key of the largest column.
  __device__ __forceinline__ uint32_t Largest() const {
    uint32_t key = 0;
#pragma unroll 1
    for (int begin = threadIdx.x / 32 * LEADER_COLUMNS; begin < source.vocab; begin += TOP_WARPS * LEADER_COLUMNS) {
      ForEach(begin, begin + LEADER_COLUMNS, [&](const float (&x)[4]) {
        key = max(key, Bits(Positive(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])))));
      });
    }
    key = WarpLargest(key);
    if (threadIdx.x % 32 == 0) scan.by_warp[threadIdx.x / 32] = key;
    __syncthreads();
    for (int w = 0; w < TOP_WARPS; ++w) key = max(key, uint32_t(scan.by_warp[w]));
    __syncthreads();
    return key;
  }

  /// Narrow [low, high] down to the bin that the limits are reached in. Returns whether `low` is the threshold; `kept`
  /// are the quanta from there on.
  __device__ __forceinline__ bool Narrow(uint32_t& low, uint32_t& high, const Limit& limits, uint64_t& kept) {
    const int thread = threadIdx.x, warp = thread / 32;
    const int shift = max(0, 23 - __clz(high - low));  // 9 bits
    __syncthreads();
    for (int i = thread; i < LEADER_BINS; i += TOP_THREADS) {
      shared.counts[i] = shared.quanta[0][i] = shared.quanta[1][i] = shared.quanta[2][i] = 0;
    }
    if (thread == 0) shared.count_above = 0, shared.quanta_above = 0, shared.bin = -1;
    __syncthreads();
    uint64_t count = 0, quanta = 0;
#pragma unroll 1
    for (int begin = warp * LEADER_COLUMNS; begin < source.vocab; begin += TOP_WARPS * LEADER_COLUMNS) {
      ForEach(begin, begin + LEADER_COLUMNS, [&](const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = Positive(x[e]);
          const uint32_t key = Bits(weight), quantum = QuantumOf(weight, scale);
          if (key > high) ++count, quanta += quantum;
          AddToBins(key >= low && key <= high ? (high - key) >> shift : LEADER_BINS, key, quantum, &shared);
        }
      });
    }
    count = WarpSum(count), quanta = WarpSum(quanta);
    if (thread % 32 == 0) {
      atomicAdd(&shared.count_above, uint32_t(count));
      atomicAdd(&shared.quanta_above, static_cast<unsigned long long>(quanta));
    }
    __syncthreads();
    const auto quanta_of = [&](int bin) {
      return shared.quanta[0][bin] + (uint64_t{shared.quanta[1][bin]} << 11) + (uint64_t{shared.quanta[2][bin]} << 22);
    };
    uint64_t columns = uint64_t(shared.counts[2 * thread]) + shared.counts[2 * thread + 1];
    uint64_t mass = quanta_of(2 * thread) + quanta_of(2 * thread + 1);
    columns = BlockBefore(columns, scan) + shared.count_above;
    __syncthreads();
    mass = BlockBefore(mass, scan) + shared.quanta_above;
    const auto is_reached = [&] { return columns >= limits.count || mass >= limits.quanta; };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool before = is_reached();
      columns += shared.counts[2 * thread + i], mass += quanta_of(2 * thread + i);
      if (is_reached() && !before) shared.bin = 2 * thread + i, shared.quanta_through = mass;
    }
    if (thread == TOP_THREADS - 1 && !is_reached()) shared.quanta_through = mass;
    __syncthreads();
    kept = shared.quanta_through;
    if (shared.bin < 0) return true;  // all are kept
    high -= uint32_t(shared.bin) << shift;
    const uint32_t width = (1u << shift) - 1;
    if (high - low > width) low = high - width;
    return shift == 0;
  }

  /// Draw a column from `threshold` on.
  __device__ __forceinline__ int Draw(float threshold, uint64_t random) {
    const int thread = threadIdx.x, vocab = source.vocab;
    const int columns =
        (vocab + LEADER_COLUMNS * LEADER_SEGMENTS - 1) / (LEADER_COLUMNS * LEADER_SEGMENTS) * LEADER_COLUMNS;
    shared.segment_quanta[thread] = 0;
    __syncthreads();
#pragma unroll 1
    for (int segment = thread / 32; segment * columns < vocab; segment += TOP_WARPS) {
      uint64_t quanta = 0;
      ForEach(segment * columns, min((segment + 1) * columns, vocab),
              [&](float (&x)[4]) { quanta += KeptQuanta(threshold, scale, x); });
      quanta = WarpSum(quanta);
      if (thread % 32 == 0) shared.segment_quanta[segment] = quanta;
    }
    __syncthreads();
    const uint64_t quanta = shared.segment_quanta[thread];
    const uint64_t before = BlockBefore(quanta, scan);
    if (thread == TOP_THREADS - 1) scan.total = before + quanta;
    __syncthreads();
    const uint64_t target = TargetOf(random, scan.total);
    if (target > before && target <= before + quanta) shared.segment = thread, shared.target = target - before;
    __syncthreads();
    const int begin = shared.segment * columns;
    return FindKept(source, begin, min(begin + columns, vocab), threshold, scale, shared.target, scan);
  }

  __device__ __forceinline__ int SearchAndDraw(const Asked& asked, uint64_t random) {
    if (largest == 0) return threadIdx.x == 0 ? -1 : ELSEWHERE;
    uint32_t low = 1, high = largest;
    Limit limits{asked.count, asked.by_mass ? QuantaLimit(asked.top_p, emax) : UNLIMITED};
    bool is_first = asked.top_k_first;
#pragma unroll 1
    for (int turn = 0; turn < 12; ++turn) {  // 4 and 4 at most
      uint64_t kept;
      if (!Narrow(low, high, limits, kept)) continue;
      if (!is_first) break;
      is_first = false;
      limits = {UNLIMITED, QuantaLimitOf(asked.top_p, kept)};
      high = largest;
    }
    return Draw(FromBits(low), random);
  }
};

/// A draw from any row, by one block: the column for one thread, -1 if there is none; ELSEWHERE for the others. Not
/// inlined, and arguments are copies, so that callers need not keep theirs in memory.
inline __device__ __noinline__ int SearchAndDraw(SegmentSource source, Asked asked, uint64_t random, ScanShared* scan,
                                                 LeaderShared* shared) {
  return Leader(source, *scan, *shared).SearchAndDraw(asked, random);
}

}  // namespace sampling
}  // namespace flashinfer
