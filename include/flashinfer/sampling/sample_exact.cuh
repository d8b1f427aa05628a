// SPDX-License-Identifier: Apache-2.0
// Exact sampling with any filter by one block that reads the row repeatedly (definitions: sampling.h). Last resort
// where estimates fail. Each pass fixes nine bits of the threshold; then the quanta of segments select the column.
#pragma once
#include "threshold_estimate.cuh"

namespace flashinfer {
namespace sampling {

constexpr int EXACT_BITS = 9, EXACT_BINS = 1 << EXACT_BITS;
static_assert(EXACT_BINS == 2 * TOP_THREADS);
constexpr int EXACT_SEGMENTS = TOP_THREADS;  // segments of a row
constexpr int EXACT_VECTORS = 8;             // vectors that a lane loads before it uses the first one
constexpr int EXACT_COLUMNS = EXACT_VECTORS * WARP_COLUMNS;

struct ExactShared {
  uint32_t quanta[3][EXACT_BINS];  // in units of 1, 2^11 and 2^22, so that none overflows: see AddToBins
  uint64_t segment_quanta[EXACT_SEGMENTS];
  uint32_t counts[EXACT_BINS];
  unsigned long long quanta_above;
  uint64_t quanta_through;
  uint64_t target;
  uint32_t count_above;
  int32_t bin, segment;
};

/// Zero the columns below `threshold`; return the quanta of the others.
__device__ __forceinline__ uint64_t KeptQuanta(float threshold, const Scale& scale, float (&x)[4]) {
  uint64_t quanta = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    x[e] = x[e] >= threshold ? x[e] : 0.f;
    quanta += QuantumOf(x[e], scale);
  }
  return quanta;
}

constexpr int ELSEWHERE = -2;  // returned by threads that do not hold the column

/// Return to one thread the column in [begin, end) that holds unit `target` of the kept quanta, and ELSEWHERE to the
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

/// Add one column per lane to its bin; EXACT_BINS means none. Lanes with equal keys are combined: atomics to one
/// address are serialised, and rows of few distinct values would take milliseconds. 64-bit shared atomics are loops, so
/// quanta are added in parts: the lower parts receive up to 2^21 additions below 2^11, the upper part at most 2^31 in
/// total.
inline __device__ __noinline__ void AddToBins(uint32_t bin, uint32_t key, uint32_t quantum, ExactShared* shared) {
  const uint32_t same = __match_any_sync(ALL_LANES, key);
  if (bin == EXACT_BINS || int(threadIdx.x % 32) != __ffs(same) - 1) return;
  const uint32_t count = __popc(same);
  const uint64_t quanta = uint64_t{count} * quantum;
  atomicAdd(shared->counts + bin, count);
  atomicAdd(shared->quanta[0] + bin, uint32_t(quanta) & 0x7FFu);
  atomicAdd(shared->quanta[1] + bin, uint32_t(quanta >> 11) & 0x7FFu);
  atomicAdd(shared->quanta[2] + bin, uint32_t(quanta >> 22));
}

struct ExactSampler {
  const SegmentSource source;
  ScanShared& scan;
  ExactShared& shared;
  uint32_t largest;
  int emax;
  Scale scale;

  __device__ __forceinline__ ExactSampler(const SegmentSource& source, ScanShared& scan, ExactShared& shared)
      : source(source),
        scan(scan),
        shared(shared),
        largest(Largest()),
        emax(ExponentOfProbs(FromBits(largest))),
        scale(emax) {}

  /// Call f(x) for each group of four columns in [begin, end), whose ends are a multiple of EXACT_COLUMNS apart, by one
  /// warp.
  template <typename F>
  __device__ __forceinline__ void ForEach(int begin, int end, const F& f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += EXACT_COLUMNS) {
      float x[EXACT_VECTORS][4];
#pragma unroll
      for (int j = 0; j < EXACT_VECTORS; ++j) {
        source.LoadFour(base + j * WARP_COLUMNS + threadIdx.x % 32 * 4, 0.f, x[j]);
      }
#pragma unroll
      for (int j = 0; j < EXACT_VECTORS; ++j) f(x[j]);
    }
  }

  /// Return the key of the largest column.
  __device__ __forceinline__ uint32_t Largest() const {
    uint32_t key = 0;
#pragma unroll 1
    for (int begin = threadIdx.x / 32 * EXACT_COLUMNS; begin < source.vocab; begin += TOP_WARPS * EXACT_COLUMNS) {
      ForEach(begin, begin + EXACT_COLUMNS, [&](const float (&x)[4]) {
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

  /// Narrow the range to the bin in which the limits are reached. Returns true if its lower end is the threshold;
  /// `kept` becomes the quanta from it on.
  __device__ __forceinline__ bool Narrow(KeyRange& range, const FilterLimits& limits, uint64_t& kept) {
    const int thread = threadIdx.x, warp = thread / 32;
    const int shift = range.Shift(EXACT_BITS);
    __syncthreads();
    for (int i = thread; i < EXACT_BINS; i += TOP_THREADS) {
      shared.counts[i] = shared.quanta[0][i] = shared.quanta[1][i] = shared.quanta[2][i] = 0;
    }
    if (thread == 0) shared.count_above = 0, shared.quanta_above = 0, shared.bin = -1;
    __syncthreads();
    uint64_t count = 0, quanta = 0;
#pragma unroll 1
    for (int begin = warp * EXACT_COLUMNS; begin < source.vocab; begin += TOP_WARPS * EXACT_COLUMNS) {
      ForEach(begin, begin + EXACT_COLUMNS, [&](const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = Positive(x[e]);
          const uint32_t key = Bits(weight), quantum = QuantumOf(weight, scale);
          if (key > range.high) ++count, quanta += quantum;
          AddToBins(range.Contains(key) ? range.Bin(key, shift) : EXACT_BINS, key, quantum, &shared);
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
    if (shared.bin < 0) return true;  // all columns are kept
    range.Narrow(uint32_t(shared.bin), shift);
    return shift == 0;
  }

  /// Sample a column from `threshold` on.
  __device__ __forceinline__ int Draw(float threshold, uint64_t random) {
    const int thread = threadIdx.x, vocab = source.vocab;
    const int columns = (vocab + EXACT_COLUMNS * EXACT_SEGMENTS - 1) / (EXACT_COLUMNS * EXACT_SEGMENTS) * EXACT_COLUMNS;
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

  __device__ __forceinline__ int SearchAndDraw(const RequestedFilter& requested, uint64_t random) {
    if (largest == 0) return threadIdx.x == 0 ? -1 : ELSEWHERE;
    KeyRange range{1, largest};
    FilterLimits limits{requested.count, requested.by_mass ? QuantaLimit(requested.top_p, emax) : UNLIMITED};
    bool is_first = requested.top_k_first;
#pragma unroll 1
    for (int turn = 0; turn < 12; ++turn) {  // at most 4 passes for each of two searches
      uint64_t kept;
      if (!Narrow(range, limits, kept)) continue;
      if (!is_first) break;
      is_first = false;
      limits = {UNLIMITED, QuantaLimitOf(requested.top_p, kept)};
      range.high = largest;
    }
    return Draw(FromBits(range.low), random);
  }
};

/// Sample from any row, by one block: returns the column to one thread (-1 if there is none) and ELSEWHERE to the
/// others. Not inlined, and arguments are copies, so that callers need not keep theirs in memory.
inline __device__ __noinline__ int SearchAndDraw(SegmentSource source, RequestedFilter requested, uint64_t random,
                                                 ScanShared* scan, ExactShared* shared) {
  return ExactSampler(source, *scan, *shared).SearchAndDraw(requested, random);
}

}  // namespace sampling
}  // namespace flashinfer
