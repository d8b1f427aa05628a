// SPDX-License-Identifier: Apache-2.0
// Inverse transform sampling over segments: sums of segments, the segment that holds the sampled unit of mass, and the
// column within that segment.
#pragma once
#include "../sampling.cuh"
#include "warp_segment.cuh"

namespace flashinfer {
namespace sampling {

__device__ __forceinline__ uint64_t RandomOf(const SampleParams& p, int64_t output) {
  return RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
}

/// Return the sum of the segment x of probabilities or logits; refill(j) is called when x[j] is no longer needed.
/// top_of_row() returns the largest logit.
template <bool LOGITS, typename Top, typename Refill>
__device__ __forceinline__ SegmentSum SumOfSegment(float (&x)[VECTORS][4], const Top& top_of_row,
                                                   const Refill& refill) {
  SegmentSum sum{};
  UnitMassSum mass;
  float largest = 0.f;
  LogitScale scale(0.f);
  if constexpr (LOGITS) {
    scale = ScaleOf(x, top_of_row);
    sum.exponent = scale.exponent;
  }
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = LOGITS ? scale.Summand(x[j][e]) : Positive(x[j][e]);
    const float four = SumOf(x[j]);
    mass.Add(four);
    if (!LOGITS) largest = fmaxf(largest, four);
    refill(j);
  }
  if (!LOGITS) sum.has_positive = __any_sync(0xffffffffu, largest > 0.f);
  sum.mass = mass.OfWarp();
  return sum;
}

/// Fallback when rounding leaves the target above the total: write the last positive column of `segment`, or -1 without
/// one. By one warp.
template <typename F>
__device__ __forceinline__ void WriteLast(const SegmentSource& source, int segment, const F& write) {
  int column = -1;
#pragma unroll 1
  for (int j = VECTORS - 1; j >= 0 && segment >= 0 && column < 0; --j) {
    const int i = SegmentSource::Column(segment, j);
    float x[4];
    source.LoadFour(i, 0.f, x);
    column = WarpMax(x[3] > 0.f ? i + 3 : x[2] > 0.f ? i + 2 : x[1] > 0.f ? i + 1 : x[0] > 0.f ? i : -1);
  }
  if (threadIdx.x % 32 == 0) write(column);
}

/// Finds the segment that holds a unit of mass among `count` segments; each warp that needs it does so itself. Each
/// lane owns an odd number of consecutive segments, which avoids shared-memory bank conflicts.
template <bool LOGITS>
struct SegmentPicker {
  static constexpr int HELD = 5;  // segments of a lane that fit in registers
  const SegmentSum* sums;
  int count, each, begin;          // number of segments; per lane; first of this lane
  int top = LEAST_EXPONENT;        // logits: exponent that the masses are relative to
  uint64_t held[HELD];             // running sums, if each == HELD
  uint64_t mass = 0, through = 0;  // mass of this lane; inclusive prefix sum
  int segment = 0;
  uint64_t target = 0;  // unit of mass within the segment

  __device__ __forceinline__ SegmentPicker(const SegmentSum* sums, int count)
      : sums(sums), count(count), each(max((count + 31) / 32 | 1, HELD)), begin(threadIdx.x % 32 * each) {}

  /// Compute prefix sums, once the sums of the segments have arrived.
  __device__ __forceinline__ void Sum() {
    if (each == HELD) {
      int exponents[HELD];
#pragma unroll
      for (int k = 0; k < HELD; ++k) {
        held[k] = 0, exponents[k] = LEAST_EXPONENT;
        if (begin + k < count) held[k] = sums[begin + k].mass, exponents[k] = sums[begin + k].exponent;
        if (LOGITS) top = max(top, exponents[k]);
      }
      if (LOGITS) top = WarpLargest(top);
#pragma unroll
      for (int k = 0; k < HELD; ++k) {
        if (LOGITS) held[k] >>= min(top - exponents[k], 63);
        mass += held[k];
        held[k] = mass;
      }
    } else {
      const int end = min(begin + each, count);
      if constexpr (LOGITS) {
#pragma unroll 1
        for (int s = begin; s < end; ++s) top = max(top, sums[s].exponent);
        top = WarpLargest(top);
      }
#pragma unroll 1
      for (int s = begin; s < end; ++s) mass += MassOf(sums[s]);
    }
    through = WarpInclusiveScan(mass);
  }

  __device__ __forceinline__ uint64_t MassOf(const SegmentSum& sum) const {
    return sum.mass >> (LOGITS ? sum.ShiftTo(top) : 0);
  }
  __device__ __forceinline__ uint64_t Total() const { return __shfl_sync(0xffffffffu, through, 31); }

  /// Find the segment of a unit; returns false if the total mass is smaller.
  __device__ __forceinline__ bool Find(uint64_t unit) {
    const uint32_t reached = __ballot_sync(0xffffffffu, through >= unit);
    if (reached == 0) return false;
    const int owner = __ffs(reached) - 1;
    target = unit - (through - mass);
    segment = begin;
    if (each == HELD) {
      uint64_t before = 0;
#pragma unroll
      for (int k = 0; k < HELD - 1; ++k) {  // unrolled without branches
        const bool is_later = held[k] < target;
        before = is_later ? held[k] : before;
        segment += is_later;
      }
      target -= before;
    } else {
      const int end = min(begin + each, count) - 1;
#pragma unroll 1
      for (int s = begin; s < end; ++s) {
        const uint64_t one = MassOf(sums[s]);
        if (s == segment && one < target) target -= one, ++segment;
      }
    }
    target = __shfl_sync(0xffffffffu, target, owner);
    segment = __shfl_sync(0xffffffffu, segment, owner);
    return true;
  }

  /// Return the last segment with a positive weight, or -1.
  __device__ __forceinline__ int Last() const {
    int last = -1;
#pragma unroll 1
    for (int s = begin; s < min(begin + each, count); ++s) {
      if (sums[s].has_positive) last = s;
    }
    return WarpMax(last);
  }
};

/// Find the column that holds `target`, a unit of the mass of a segment: each warp sums one or more vectors of the
/// segment, and one lane calls found(j, column) for vector j. weights_of(j, four) loads this lane's weights of vector
/// j.
template <typename Weights, typename Mass, typename F>
__device__ __forceinline__ void FindInSegment(uint64_t target, int shift, int warp, int warps,
                                              uint64_t (&masses)[VECTORS], const Weights& weights_of,
                                              const Mass& mass_of, const F& found) {
  const int lane = threadIdx.x % 32;
  float four[4];
  uint64_t mass = 0;
#pragma unroll 1
  for (int j = warp; j < VECTORS; j += warps) {
    weights_of(j, four);
    mass = mass_of(SumOf(four));
    const uint64_t of_warp = WarpMass(mass);
    if (lane == 0) masses[j] = of_warp;
  }
  __syncthreads();
#pragma unroll 1
  for (int j = warp; j < VECTORS; j += warps) {
    uint64_t before = 0;
#pragma unroll
    for (int k = 0; k < VECTORS - 1; ++k) before += k < j ? masses[k] : 0;
    if (before >> shift >= target) return;
    if (warps < VECTORS) {
      if (j < VECTORS - 1 && (before + masses[j]) >> shift < target) continue;
      weights_of(j, four);
      mass = mass_of(SumOf(four));
    }
    const uint64_t through = before + WarpInclusiveScan(mass);
    const uint32_t reached = __ballot_sync(0xffffffffu, through >> shift >= target);
    if (reached == 0) continue;
    if (lane != __ffs(reached) - 1) return;
    const uint64_t mine = through - mass;
    found(j, ColumnOfFour(four, [&](float sum) { return (mine + mass_of(sum)) >> shift >= target; }));
    return;
  }
}

}  // namespace sampling
}  // namespace flashinfer
