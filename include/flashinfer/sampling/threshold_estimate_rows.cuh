// SPDX-License-Identifier: Apache-2.0
// Estimates of the threshold of a filter from a sample of the row, which is counted in bins. The sums below each bin
// tell, within a few standard deviations, which columns are dropped and which are kept. A wrong estimate costs time,
// never correctness. Two estimators:
//   FindBounds        coarse, for filters that write rows: one pass over the sample for weights, up to four for logits
//   FindTightBounds   fine, for rows whose coarse estimate was wrong or leaves too many columns: flat rows, or rows
//                     with many equal columns. Samples are counted in finer and finer bins until the list can hold
//                     the columns between the bounds, except for ties at the lower bound.
#pragma once
#include <cfloat>

#include "../ptx/reduce.cuh"
#include "block_scan.cuh"
#include "row_chunks.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SAMPLE_THREADS = CHUNK_THREADS, SAMPLE_WARPS = CHUNK_WARPS;
constexpr int SAMPLE_BINS = 2 * SAMPLE_THREADS;
constexpr int SAMPLE_VECTORS = 4;                      // vectors of four columns per thread
constexpr int SAMPLE_EACH = 4 * SAMPLE_VECTORS;        // columns per thread
constexpr int SAMPLE_PIECE = 16;                       // neighbouring columns: one DRAM access
constexpr int SAMPLES = SAMPLE_EACH * SAMPLE_THREADS;  // columns
constexpr int OCTAVE_SHIFT = 19;                       // right shift of keys that gives 16 bins per octave of weights
constexpr uint32_t BELOW_TWO = (uint32_t(ONE + 1) << 23) - 1;  // largest key of weights below 2
constexpr float SAMPLE_DEVIATIONS = 4.5f;                      // standard deviations around the threshold, at first

/// Limits of a filter: keep `count` columns, or all columns but for `rest` of the mass (negative: no such limit).
struct EstimateLimits {
  float count, rest;
};

/// Load this thread's columns of a sample that is spread over the row.
template <typename T>
__device__ __forceinline__ void LoadSample(const T* row, int vocab, float (&x)[SAMPLE_VECTORS][4]) {
  constexpr int PIECES = SAMPLES / SAMPLE_PIECE, OF_PIECE = SAMPLE_PIECE / 4;
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < SAMPLE_VECTORS; ++i) {
    const int piece = i * (SAMPLE_THREADS / OF_PIECE) + thread / OF_PIECE;
    const int column = int(uint64_t(piece) * (vocab / SAMPLE_PIECE) / PIECES) * SAMPLE_PIECE + thread % OF_PIECE * 4;
    if (IsVector<T>(row)) {  // rows of more than one piece
      LoadVector(row + column, x[i]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = ToFloat(row[column + e]);
    }
  }
}

/// True if a sample counts: positive weights, or finite logits.
template <bool SIGNED>
__device__ __forceinline__ bool IsCounted(float value) {
  return SIGNED ? fabsf(value) < INFINITY : value > 0.f && value < INFINITY;
}

/// Return bin `i` of the two that this thread owns; threads own bins upwards from the lowest.
__device__ __forceinline__ int SampleBin(int i) { return SAMPLE_BINS - 1 - 2 * int(threadIdx.x) - i; }

// --------------------------------------------------------------------------------------------- coarse estimate

constexpr float BOUND_LEAST = 16.f;  // minimum of samples above a bound by mass
constexpr float BOUND_UNSEEN = 2.f;  // samples as heavy as the bound that may be below it, unseen

struct BoundShared {
  uint32_t bins[SAMPLE_BINS];
  uint32_t top, bottom;  // keys
  int32_t low_bin, high_bin;
  float samples, samples_before, samples_high;
  float scratch[3][SAMPLE_WARPS];
};

/// Estimated bounds of the threshold: keys below `low` are dropped, keys above `high` are probably all kept. `expected`
/// and `certain` are the expected numbers of columns from `low` on and above `high`.
struct Bounds : KeyRange {
  float expected, certain;
};

/// Bins of keys, downwards from `top`; each thread owns two of them.
template <bool SIGNED>
struct BoundBins {
  uint32_t top, bottom;  // keys
  int shift;
  float count[2], weight[2];  // samples of the bin, and the most that each weighs
  float before[3];            // sums over lower bins: samples, their weights and squared weights
  float all;                  // samples

  __device__ __forceinline__ int64_t UpperKey(int bin) const { return int64_t(top) - (int64_t(bin) << shift); }

  /// Set the range of the bins: fixed for weights, the range of the sample for logits.
  __device__ __forceinline__ void Start(const float (&x)[SAMPLE_VECTORS][4], BoundShared& shared) {
    top = BELOW_TWO, bottom = 1;
    if constexpr (SIGNED) {
      top = 0, bottom = ~0u;
#pragma unroll
      for (int i = 0; i < SAMPLE_EACH; ++i) {
        const uint32_t key = OrderedKey(x[i / 4][i % 4]);
        if (IsCounted<SIGNED>(x[i / 4][i % 4])) top = max(top, key), bottom = min(bottom, key);
      }
      top = ptx::ReduceMax(top), bottom = ptx::ReduceMin(bottom);
      if (threadIdx.x % 32 == 0) atomicMax(&shared.top, top), atomicMin(&shared.bottom, bottom);
      __syncthreads();
      top = shared.top, bottom = shared.bottom;
    }
  }

  /// Count the sample in the empty bins. 16 bins per octave are enough for weights.
  __device__ __forceinline__ void Fill(const float (&x)[SAMPLE_VECTORS][4], BoundShared& shared) {
    shift = SIGNED ? max(0, 23 - __clz(max(top, bottom) - bottom)) : OCTAVE_SHIFT;
#pragma unroll
    for (int i = 0; i < SAMPLE_EACH; ++i) {
      const uint32_t key = ColumnKey<SIGNED>(x[i / 4][i % 4]);
      if (!IsCounted<SIGNED>(x[i / 4][i % 4]) || (SIGNED && (key > top || key < bottom))) continue;
      atomicAdd(shared.bins + (key > top ? 0 : min((top - key) >> shift, SAMPLE_BINS - 1u)), 1u);
    }
    __syncthreads();
  }

  /// Prefix sums upwards from the lowest bin; `higher` samples are above the top.
  __device__ __forceinline__ void Sum(float higher, BoundShared& shared) {
    // After a barrier of this pass: other threads may still read the values of the last one.
    if (threadIdx.x == 0) shared.low_bin = SAMPLE_BINS, shared.high_bin = -1;
    float sums[3] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      count[i] = float(shared.bins[SampleBin(i)]);
      weight[i] = SIGNED ? 0.f : FromBits(uint32_t(max(UpperKey(SampleBin(i)), int64_t{1})));
      sums[0] += count[i], sums[1] += count[i] * weight[i], sums[2] += count[i] * weight[i] * weight[i];
    }
    all = higher;
    BlockExclusiveScan<SIGNED ? 1 : 3>(sums, before, all, shared.scratch);
  }

  /// Choose the highest bin that is certainly low enough and the lowest that is certainly high enough, where each
  /// sample stands for `each` columns, and the number of samples from there on. Clears the bins.
  __device__ __forceinline__ void Choose(const EstimateLimits& limits, int vocab, float each, float most, float least,
                                         BoundShared& shared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float through = all - before[0];  // samples in this bin and above
      bool is_low = through >= most, is_high = through < least;
      if constexpr (!SIGNED) {
        const float deviation = SAMPLE_DEVIATIONS * sqrtf(before[2] + BOUND_UNSEEN * weight[i] * weight[i]);
        is_low |= through >= BOUND_LEAST && each * (before[1] + deviation) <= limits.rest;
        is_low |= float(vocab) * weight[i] <= limits.rest;  // holds for any weights of the other columns
        // The weight of a sample is overestimated by up to one bin width.
        is_high &= limits.rest < 0.f || each * (0.95f * before[1] - deviation) > limits.rest;
        before[1] += count[i] * weight[i], before[2] += count[i] * weight[i] * weight[i];
      }
      before[0] += count[i];
      if (is_low) atomicMin(&shared.low_bin, SampleBin(i));
      if (is_high) atomicMax(&shared.high_bin, SampleBin(i));
    }
    for (int i = threadIdx.x; i < SAMPLE_BINS; i += SAMPLE_THREADS) shared.bins[i] = 0;
    __syncthreads();
    const int low = shared.low_bin, high = shared.high_bin;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      before[0] -= count[i];
      if (SampleBin(i) == low) shared.samples = all - before[0], shared.samples_before = all - before[0] - count[i];
      if (SampleBin(i) == high) shared.samples_high = all - before[0];
    }
    __syncthreads();
  }
};

/// Estimate the bounds, by all threads of a block of SAMPLE_THREADS; the same row gives the same result in each block.
/// `meanwhile()` is called while the sample is loaded.
template <bool SIGNED, typename T, typename F>
__device__ __forceinline__ Bounds FindBounds(const T* row, int vocab, const EstimateLimits& limits, BoundShared& shared,
                                             const F& meanwhile) {
  float x[SAMPLE_VECTORS][4];
  LoadSample(row, vocab, x);
  meanwhile();
  for (int i = threadIdx.x; i < SAMPLE_BINS; i += SAMPLE_THREADS) shared.bins[i] = 0;
  if (SIGNED && threadIdx.x == 0) shared.top = 0, shared.bottom = ~0u;
  __syncthreads();
  BoundBins<SIGNED> bins;
  bins.Start(x, shared);
  const float each = float(vocab) / float(SAMPLES), mean = limits.count / each;
  const float most = mean + SAMPLE_DEVIATIONS * sqrtf(mean) + 3.f, least = mean - SAMPLE_DEVIATIONS * sqrtf(mean) - 3.f;
  Bounds bounds{{SIGNED ? ColumnKey<true>(-FLT_MAX) : 1u, ~0u}, 0.f, 0.f};  // all columns but -inf, or 0
  float higher = 0.f;
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    bins.Fill(x, shared);
    bins.Sum(higher, shared);
    if (turn == 0) bounds.expected = each * bins.all;
    bins.Choose(limits, vocab, each, most, least, shared);
    const int low = shared.low_bin, high = shared.high_bin;
    if (turn == 0 && high >= 0 && high < low) {
      bounds.high = uint32_t(max(bins.UpperKey(high + 1), int64_t{1})), bounds.certain = each * shared.samples_high;
    }
    if (low >= SAMPLE_BINS - (SIGNED ? 0 : 1)) return bounds;
    bounds.low = uint32_t(max(bins.UpperKey(low + 1) + 1, int64_t{1}));
    bounds.expected = each * fmaxf(shared.samples, 1.f);
    // A bin with too many columns is divided in the next pass.
    if (!SIGNED || bins.shift == 0 || shared.samples <= 2.f * most) return bounds;
    higher = shared.samples_before;
    bins.top = uint32_t(bins.UpperKey(low)), bins.bottom = bounds.low;
  }
  return bounds;
}

// ----------------------------------------------------------------------------------------------- fine estimate

constexpr int TIGHT_TURNS = 4;         // passes: 16 bins per octave of weights, then 9 bits of the key each
constexpr float TIGHT_ERROR = 0.004f;  // mean relative error of a weight that is known by its bin

struct TightShared {
  uint32_t bins[SAMPLE_BINS];
  uint32_t top, bottom, equal;
  int32_t low_bin, high_bin;
  float from_low, from_high;       // samples
  float lower_mass, lower_square;  // sums over samples below the low bin
  float scratch[3][SAMPLE_WARPS];
};

struct TightLimits : EstimateLimits {
  float most;        // capacity of the list for columns within the bounds
  float deviations;  // minimum width of the bounds in standard deviations, where more columns would be within
};

/// Estimated bounds of the threshold: keys below `low` are dropped, keys above `high` are probably all kept.
struct TightBounds : KeyRange {
  float within;      // expected columns between the bounds, without ties
  bool has_ties;     // more columns equal `low` than the list can hold
  uint32_t largest;  // largest key of the sample
};

/// Finds the bounds, by all threads of a block of SAMPLE_THREADS.
template <bool SIGNED>
struct Tightener {
  TightShared& shared;
  const TightLimits limits;
  const float each;  // columns that one sample stands for
  uint32_t keys[SAMPLE_EACH];
  TightBounds bounds;
  float expected = 0.f;                        // expected columns from the lower bound on
  float certain = 0.f;                         // samples above the upper bound
  float lower_mass = 0.f, lower_square = 0.f;  // sums over samples below the lower bound

  /// Load the sample; columns that do not count get the key 0, which is below any other.
  template <typename T>
  __device__ __forceinline__ Tightener(const T* row, int vocab, const TightLimits& limits, TightShared& shared)
      : shared(shared),
        limits(limits),
        each(float(vocab) / SAMPLES),
        bounds{{SIGNED ? ColumnKey<true>(-FLT_MAX) : 1u, ~0u}, float(vocab), false, 0} {  // all but -inf, or 0
    float x[SAMPLE_VECTORS][4];
    LoadSample(row, vocab, x);
#pragma unroll
    for (int i = 0; i < SAMPLE_EACH; ++i) {
      keys[i] = IsCounted<SIGNED>(x[i / 4][i % 4]) ? ColumnKey<SIGNED>(x[i / 4][i % 4]) : 0;
    }
  }

  /// Find the smallest and largest sampled key in [low, high].
  __device__ __forceinline__ void FindSamples(uint32_t low, uint32_t high, uint32_t& bottom, uint32_t& top) {
    bottom = ~0u, top = 0;
#pragma unroll
    for (int i = 0; i < SAMPLE_EACH; ++i) {
      if (keys[i] >= low && keys[i] <= high) top = max(top, keys[i]), bottom = min(bottom, keys[i]);
    }
    top = ptx::ReduceMax(top), bottom = ptx::ReduceMin(bottom);
    if (threadIdx.x == 0) shared.top = 0, shared.bottom = ~0u;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&shared.top, top), atomicMin(&shared.bottom, bottom);
    __syncthreads();
    top = shared.top, bottom = shared.bottom;
  }

  /// Tighten the bounds: count samples from `bottom` on in bins of 2^shift keys, downwards from `top`.
  __device__ __forceinline__ void Narrow(uint32_t bottom, uint32_t top, int shift, float deviations, bool is_first) {
    const int thread = threadIdx.x;
    const auto upper_key = [&](int bin) { return int64_t(top) - (int64_t(bin) << shift); };
    for (int i = thread; i < SAMPLE_BINS; i += SAMPLE_THREADS) shared.bins[i] = 0;
    if (thread == 0) shared.low_bin = SAMPLE_BINS, shared.high_bin = -1;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SAMPLE_EACH; ++i) {
      const uint32_t key = keys[i], bin = key > top ? 0 : min((top - key) >> shift, SAMPLE_BINS - 1u);
      if (key >= bottom && (is_first || key <= top)) atomicAdd(shared.bins + bin, 1u);
    }
    __syncthreads();
    // Prefix sums upwards from the lowest bin: samples, weights and squared weights below. A thread has two bins.
    float count[2], weight[2], sums[3] = {}, before[3];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int bin = SampleBin(i);
      const int64_t middle = upper_key(bin) - (int64_t{1} << shift >> 1);
      count[i] = float(shared.bins[bin]);
      weight[i] = SIGNED ? 0.f : FromBits(uint32_t(max(middle, int64_t{1})));
      sums[0] += count[i], sums[1] += count[i] * weight[i], sums[2] += count[i] * weight[i] * weight[i];
    }
    float all = certain;
    BlockExclusiveScan<3>(sums, before, all, shared.scratch);
    before[1] += lower_mass, before[2] += lower_square;
    const auto is_more = [&](float excess, float variance) {  // z-test
      return excess >= 0.f && excess * excess >= deviations * deviations * variance;
    };
    const float mean = limits.count / each, rest = limits.rest / each, of_count = mean * (1.f - mean / SAMPLES);
    float from[2], mass[2], square[2];  // samples from a bin on, and sums of what is below it
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] = all - before[0], mass[i] = before[1], square[i] = before[2];
      bool is_low = is_more(from[i] - mean - 3.f, of_count), is_high = is_more(mean - from[i] - 3.f, of_count);
      if constexpr (!SIGNED) {
        // Variance of a sum of samples, plus one more column that may be there, unseen.
        const float variance = square[i] - mass[i] * mass[i] / SAMPLES + weight[i] * weight[i];
        is_low |= is_more(rest - (1.f + TIGHT_ERROR) * mass[i], variance);
        is_high &= rest < 0.f || is_more((1.f - TIGHT_ERROR) * mass[i] - rest, variance);
      }
      const int bin = SampleBin(i);
      if (is_low) atomicMin(&shared.low_bin, bin);
      if (is_high) atomicMax(&shared.high_bin, bin);
      before[0] += count[i], before[1] += count[i] * weight[i], before[2] += count[i] * weight[i] * weight[i];
    }
    __syncthreads();
    const int low = shared.low_bin, high = shared.high_bin < low ? shared.high_bin : -1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int bin = SampleBin(i);
      if (bin == low) shared.from_low = from[i], shared.lower_mass = mass[i], shared.lower_square = square[i];
      if (bin == high) shared.from_high = from[i];
    }
    __syncthreads();
    if (high >= 0) bounds.high = uint32_t(max(upper_key(high + 1), int64_t{1})), certain = shared.from_high;
    if (is_first) expected = each * all;
    if (low < SAMPLE_BINS) {
      bounds.low = uint32_t(max(upper_key(low + 1) + 1, int64_t(bottom)));
      expected = each * shared.from_low;
      lower_mass = shared.lower_mass, lower_square = shared.lower_square;
    }
    bounds.within = expected - each * certain;
  }

  __device__ __forceinline__ TightBounds Find() {
    uint32_t bottom, top;
    FindSamples(1, ~0u, bottom, top);
    bounds.largest = top;
    if (bottom > top) return bounds;  // no sample counts
#pragma unroll 1
    for (int turn = 0; turn < TIGHT_TURNS; ++turn) {
      // Weights are known by their bins from the first pass on, so these bins have to be narrow from the beginning.
      const bool by_octave = !SIGNED && turn == 0;
      const int shift = by_octave ? OCTAVE_SHIFT : max(0, 23 - __clz(top - bottom));  // 9 bits
      const float deviations = fmaxf(limits.deviations, SAMPLE_DEVIATIONS + 1.f - max(turn, 1));
      Narrow(by_octave ? 1 : bottom, by_octave ? BELOW_TWO : top, shift, deviations, turn == 0);
      if (bounds.within <= limits.most) return bounds;
      if (shift == 0) break;
      FindSamples(bounds.low, bounds.high, bottom, top);
      if (bottom > top) return bounds;
      bounds.low = bottom;  // columns below that were not sampled weigh little
    }
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < SAMPLE_EACH; ++i) equal += keys[i] == bounds.low;
    equal = ptx::ReduceAdd(equal);
    if (threadIdx.x == 0) shared.equal = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicAdd(&shared.equal, equal);
    __syncthreads();
    const float others = bounds.within - each * float(shared.equal);
    if (others <= limits.most) bounds.within = others, bounds.has_ties = true;
    return bounds;
  }
};

/// Estimate the bounds; the same row gives the same result in each block. Ends with a barrier.
template <bool SIGNED, typename T>
__device__ __forceinline__ TightBounds FindTightBounds(const T* row, int vocab, const TightLimits& limits,
                                                       TightShared& shared) {
  const TightBounds bounds = Tightener<SIGNED>(row, vocab, limits, shared).Find();
  __syncthreads();
  return bounds;
}

}  // namespace sampling
}  // namespace flashinfer
