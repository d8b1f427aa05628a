// SPDX-License-Identifier: Apache-2.0
// Coarse estimate of the threshold of a filter that writes rows: a sample of the row is counted in bins, and the sums
// below each bin tell, within a few standard deviations, which columns are dropped and which are kept. A wrong estimate
// costs time, never correctness.
#pragma once
#include <cfloat>

#include "../ptx/reduce.cuh"
#include "row_chunks.cuh"

namespace flashinfer {
namespace sampling {

constexpr int BOUND_THREADS = CHUNK_THREADS, BOUND_WARPS = CHUNK_WARPS;
constexpr int BOUND_BINS = 2 * BOUND_THREADS;
constexpr int BOUND_VECTORS = 4;  // vectors of four columns per thread
constexpr int BOUND_PIECE = 16;   // neighbouring columns: one DRAM access
constexpr int BOUND_EACH = 4 * BOUND_VECTORS;
constexpr int BOUND_SAMPLES = BOUND_EACH * BOUND_THREADS;
constexpr float BOUND_DEVIATIONS = 4.5f;
constexpr uint32_t BELOW_TWO = 0x3fffffffu;  // upper end of the bins of weights
constexpr float BOUND_LEAST = 16.f;          // minimum of samples above a bound by mass
constexpr float BOUND_UNSEEN = 2.f;          // samples as heavy as the bound that may be below it, unseen

struct BoundShared {
  uint32_t bins[BOUND_BINS];
  uint32_t top, bottom;  // keys
  int32_t low_bin, high_bin;
  float samples, samples_before, samples_high;
  float scratch[3][BOUND_WARPS];
};

/// Limits of a filter: keep `count` columns, or all columns but for `rest` of the mass (negative: no such limit).
struct BoundLimits {
  float count, rest;
};

/// Estimated bounds of the threshold: keys below `low` are dropped, keys above `high` are probably all kept. `expected`
/// and `certain` are the expected numbers of columns from `low` on and above `high`.
struct Bounds {
  uint32_t low, high;
  float expected, certain;
};

/// Load this thread's columns of a sample that is spread over the row.
template <typename T>
__device__ __forceinline__ void LoadSample(const T* row, int vocab, float (&x)[BOUND_VECTORS][4]) {
  constexpr int PIECES = BOUND_SAMPLES / BOUND_PIECE, OF_PIECE = BOUND_PIECE / 4;
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < BOUND_VECTORS; ++i) {
    const int piece = i * (BOUND_THREADS / OF_PIECE) + thread / OF_PIECE;
    const int column = int(uint64_t(piece) * (vocab / BOUND_PIECE) / PIECES) * BOUND_PIECE + thread % OF_PIECE * 4;
    if (IsVector<T>(row)) {  // rows of more than one piece
      LoadVector(row + column, x[i]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = ToFloat(row[column + e]);
    }
  }
}

/// Bins of keys, downwards from `top`; each thread owns two of them.
template <bool SIGNED>
struct BoundBins {
  uint32_t top, bottom;  // keys
  int shift;
  float count[2], weight[2];  // samples of the bin, and the most that each weighs
  float before[3];            // sums over lower bins: samples, their weights and squared weights
  float all;                  // samples

  static __device__ __forceinline__ bool IsCounted(float value) {
    return SIGNED ? fabsf(value) < INFINITY : value > 0.f && value < INFINITY;
  }
  static __device__ __forceinline__ int Bin(int i) { return BOUND_BINS - 1 - 2 * int(threadIdx.x) - i; }
  __device__ __forceinline__ int64_t UpperKey(int bin) const { return int64_t(top) - (int64_t(bin) << shift); }

  /// Set the range of the bins: fixed for weights, the range of the sample for logits.
  __device__ __forceinline__ void Start(const float (&x)[BOUND_VECTORS][4], BoundShared& shared) {
    top = BELOW_TWO, bottom = 1;
    if constexpr (SIGNED) {
      top = 0, bottom = ~0u;
#pragma unroll
      for (int i = 0; i < BOUND_EACH; ++i) {
        const uint32_t key = OrderedKey(x[i / 4][i % 4]);
        if (IsCounted(x[i / 4][i % 4])) top = max(top, key), bottom = min(bottom, key);
      }
      top = ptx::ReduceMax(top), bottom = ptx::ReduceMin(bottom);
      if (threadIdx.x % 32 == 0) atomicMax(&shared.top, top), atomicMin(&shared.bottom, bottom);
      __syncthreads();
      top = shared.top, bottom = shared.bottom;
    }
  }

  /// Count the sample in the empty bins. 16 bins per octave are enough for weights.
  __device__ __forceinline__ void Fill(const float (&x)[BOUND_VECTORS][4], BoundShared& shared) {
    shift = SIGNED ? max(0, 23 - __clz(max(top, bottom) - bottom)) : 19;
#pragma unroll
    for (int i = 0; i < BOUND_EACH; ++i) {
      const uint32_t key = ColumnKey<SIGNED>(x[i / 4][i % 4]);
      if (!IsCounted(x[i / 4][i % 4]) || (SIGNED && (key > top || key < bottom))) continue;
      atomicAdd(shared.bins + (key > top ? 0 : min((top - key) >> shift, BOUND_BINS - 1u)), 1u);
    }
    __syncthreads();
  }

  /// Prefix sums upwards from the lowest bin; `higher` samples are above the top.
  __device__ __forceinline__ void Sum(float higher, BoundShared& shared) {
    constexpr int SUMS = SIGNED ? 1 : 3;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // After a barrier of this pass: other threads may still read the values of the last one.
    if (threadIdx.x == 0) shared.low_bin = BOUND_BINS, shared.high_bin = -1;
    float sums[3] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      count[i] = float(shared.bins[Bin(i)]);
      weight[i] = SIGNED ? 0.f : FromBits(uint32_t(max(UpperKey(Bin(i)), int64_t{1})));
      sums[0] += count[i], sums[1] += count[i] * weight[i], sums[2] += count[i] * weight[i] * weight[i];
    }
#pragma unroll
    for (int n = 0; n < SUMS; ++n) {
      float through = sums[n];
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float below = __shfl_up_sync(0xffffffffu, through, offset);
        if (lane >= offset) through += below;
      }
      before[n] = __shfl_up_sync(0xffffffffu, through, 1);
      if (lane == 0) before[n] = 0.f;
      if (lane == 31) shared.scratch[n][warp] = through;
    }
    __syncthreads();
    all = higher;
#pragma unroll
    for (int w = 0; w < BOUND_WARPS; ++w) {
      all += shared.scratch[0][w];
#pragma unroll
      for (int n = 0; n < SUMS; ++n) before[n] += w < warp ? shared.scratch[n][w] : 0.f;
    }
  }

  /// Choose the highest bin that is certainly low enough and the lowest that is certainly high enough, where each
  /// sample stands for `each` columns, and the number of samples from there on. Clears the bins.
  __device__ __forceinline__ void Choose(const BoundLimits& limits, int vocab, float each, float most, float least,
                                         BoundShared& shared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float through = all - before[0];  // samples in this bin and above
      bool is_low = through >= most, is_high = through < least;
      if constexpr (!SIGNED) {
        const float deviation = BOUND_DEVIATIONS * sqrtf(before[2] + BOUND_UNSEEN * weight[i] * weight[i]);
        is_low |= through >= BOUND_LEAST && each * (before[1] + deviation) <= limits.rest;
        is_low |= float(vocab) * weight[i] <= limits.rest;  // holds for any weights of the other columns
        // The weight of a sample is overestimated by up to one bin width.
        is_high &= limits.rest < 0.f || each * (0.95f * before[1] - deviation) > limits.rest;
        before[1] += count[i] * weight[i], before[2] += count[i] * weight[i] * weight[i];
      }
      before[0] += count[i];
      if (is_low) atomicMin(&shared.low_bin, Bin(i));
      if (is_high) atomicMax(&shared.high_bin, Bin(i));
    }
    for (int i = threadIdx.x; i < BOUND_BINS; i += BOUND_THREADS) shared.bins[i] = 0;
    __syncthreads();
    const int low = shared.low_bin, high = shared.high_bin;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      before[0] -= count[i];
      if (Bin(i) == low) shared.samples = all - before[0], shared.samples_before = all - before[0] - count[i];
      if (Bin(i) == high) shared.samples_high = all - before[0];
    }
    __syncthreads();
  }
};

/// Estimate the bounds, by all threads of a block of BOUND_THREADS; the same row gives the same result in each block.
/// `meanwhile()` is called while the sample is loaded.
template <bool SIGNED, typename T, typename F>
__device__ __forceinline__ Bounds FindBounds(const T* row, int vocab, const BoundLimits& limits, BoundShared& shared,
                                             const F& meanwhile) {
  float x[BOUND_VECTORS][4];
  LoadSample(row, vocab, x);
  meanwhile();
  for (int i = threadIdx.x; i < BOUND_BINS; i += BOUND_THREADS) shared.bins[i] = 0;
  if (SIGNED && threadIdx.x == 0) shared.top = 0, shared.bottom = ~0u;
  __syncthreads();
  BoundBins<SIGNED> bins;
  bins.Start(x, shared);
  const float each = float(vocab) / float(BOUND_SAMPLES), mean = limits.count / each;
  const float most = mean + BOUND_DEVIATIONS * sqrtf(mean) + 3.f, least = mean - BOUND_DEVIATIONS * sqrtf(mean) - 3.f;
  Bounds bounds{SIGNED ? ColumnKey<true>(-FLT_MAX) : 1u, ~0u, 0.f, 0.f};  // all columns but -inf, or 0
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
    if (low >= BOUND_BINS - (SIGNED ? 0 : 1)) return bounds;
    bounds.low = uint32_t(max(bins.UpperKey(low + 1) + 1, int64_t{1}));
    bounds.expected = each * fmaxf(shared.samples, 1.f);
    // A bin with too many columns is divided in the next pass.
    if (!SIGNED || bins.shift == 0 || shared.samples <= 2.f * most) return bounds;
    higher = shared.samples_before;
    bins.top = uint32_t(bins.UpperKey(low)), bins.bottom = bounds.low;
  }
  return bounds;
}

}  // namespace sampling
}  // namespace flashinfer
