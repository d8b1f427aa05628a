// SPDX-License-Identifier: Apache-2.0
// Where the threshold of a filter most likely is, from a sample of a row of probabilities: 4096 columns, spread over
// the row, in bins of keys. What is below the threshold is estimated, as it is many columns of little weight each; of
// the few heavy ones above, a sample says nothing. Rows are taken as normalised. A guess that is wrong costs time.
#pragma once
#include "scan.cuh"
#include "segment.cuh"

namespace flashinfer {
namespace sampling {

constexpr int GUESS_BINS = 512;                    // 16 to an octave, from 2^-31 on
constexpr int GUESS_SHIFT = 19;                    // of keys
constexpr uint32_t GUESS_FIRST = (ONE - 31) << 4;  // key of the first bin, shifted
constexpr int GUESS_SAMPLES = 4096;                // columns: a warp takes 32 next to each other
constexpr int GUESS_LONG = 196608;                 // long rows, of more columns, have a sample of twice as many
constexpr float GUESS_DEVIATIONS = 4.f;            // standard deviations that the range is wide, on either side

/// What a filter asks of a row.
struct Asked {
  uint64_t count;  // fewer columns than this are above one that is kept
  float top_p;
  bool by_mass;
  bool top_k_first;  // top_p is of the columns that top-k keeps

  /// Whether it is of all columns.
  __device__ __forceinline__ bool ByTotal() const { return top_k_first && count == UNLIMITED; }
};

/// Columns from `high` on are kept, those below `low` are not.
struct Range {
  float low, high;
};

struct GuessShared {
  uint32_t quanta[GUESS_BINS], counts[GUESS_BINS];
  float mass[WIDE_THREADS / 32], variance[WIDE_THREADS / 32];
  uint32_t count[WIDE_THREADS / 32];
  int32_t low, high;
};

/// Whether `much` is more than could be by chance.
__device__ __forceinline__ bool IsCertain(float much, float variance) {
  return much >= 0.f && much * much >= GUESS_DEVIATIONS * GUESS_DEVIATIONS * variance;
}

/// Put a sample of the row into bins, of mass or count or both. Returns how many columns there are for one of the sample.
template <int THREADS, bool MAY_BE_LONG, typename Sampled>
__device__ __forceinline__ float FillBins(const SegmentSource& source, bool by_mass, bool by_count, GuessShared& shared,
                                          const Sampled& sampled) {
  constexpr int EACH = GUESS_SAMPLES / THREADS, WARPS = THREADS / 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  float x[EACH];
  const uint32_t step = source.vocab / EACH & ~31u;
  const auto load = [&](uint32_t offset) {
    const float* const from = source.row + (offset & ~31u) + lane;
#pragma unroll
    for (int j = 0; j < EACH; ++j) x[j] = from[j * step];
  };
  load(warp * step / WARPS);
  for (int i = thread; i < GUESS_BINS; i += THREADS) shared.quanta[i] = shared.counts[i] = 0;
  if (thread == 0) shared.low = 0, shared.high = GUESS_BINS;
  __syncthreads();
  const Scale scale(ONE);
  const auto bin_of = [](float weight) {  // that of 0 is the lowest, which does no harm
    return min(max(int(Bits(weight) >> GUESS_SHIFT) - int(GUESS_FIRST), 0), GUESS_BINS - 1);
  };
  uint32_t* const bins = by_mass ? shared.quanta : shared.counts;
  const auto add = [&] {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      atomicAdd(bins + bin_of(x[j]), by_mass ? QuantumOf(x[j], scale) : 1u);
    }
    if (by_mass && by_count) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) atomicAdd(shared.counts + bin_of(x[j]), 1u);
    }
  };
#pragma unroll
  for (int j = 0; j < EACH; ++j) x[j] = Positive(x[j]);
  sampled();
  add();
  const bool is_long = MAY_BE_LONG && source.vocab > GUESS_LONG;
  if (is_long) {
    load((2 * warp + 1) * step / (2 * WARPS));
#pragma unroll
    for (int j = 0; j < EACH; ++j) x[j] = Positive(x[j]);
    add();
  }
  __syncthreads();
  return float(source.vocab) * (is_long ? 0.5f / GUESS_SAMPLES : 1.f / GUESS_SAMPLES);
}

/// All columns within the range where they are at most `most_listed`; `expected` of them, or more. sampled() is called
/// once the sample is loaded.
template <int THREADS, bool MAY_BE_LONG, typename Sampled>
__device__ __forceinline__ Range GuessRange(const SegmentSource& source, const Asked& asked, int most_listed,
                                            float& expected, GuessShared& shared, const Sampled& sampled) {
  constexpr int WARPS = THREADS / 32, BINS = GUESS_BINS / THREADS;  // of a thread
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float lowest = FromBits(1);
  expected = 0.f;
  const bool by_count = asked.count != UNLIMITED, by_mass = asked.by_mass || asked.ByTotal();
  if (!by_count && !by_mass) return {lowest, lowest};
  if (source.vocab <= most_listed) return {lowest, 2.f};
  const float each = FillBins<THREADS, MAY_BE_LONG>(source, by_mass, by_count, shared, sampled);
  // Each thread has one bin or two. Edge i of them: what the sample has below, and how many columns from there on.
  const auto edge = [&](int bin) { return FromBits((GUESS_FIRST + bin) << GUESS_SHIFT); };
  const float unit = each * (1.f / 2147483648.f);
  float mass[BINS], variance[BINS], all_mass = 0.f, all_variance = 0.f;
  uint32_t count[BINS], all_count = 0;
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    mass[i] = float(shared.quanta[BINS * thread + i]) * unit;
    variance[i] = mass[i] * edge(BINS * thread + i + 1) * each;
    count[i] = shared.counts[BINS * thread + i];
    all_mass += mass[i], all_variance += variance[i], all_count += count[i];
  }
  float below = WarpInclusiveScan(all_mass), spread = WarpInclusiveScan(all_variance);
  uint32_t fewer = WarpInclusiveScan(all_count), all = 0;
  if (lane == 31) shared.mass[warp] = below, shared.variance[warp] = spread, shared.count[warp] = fewer;
  __syncthreads();
  below -= all_mass, spread -= all_variance, fewer -= all_count;
#pragma unroll 1
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) below += shared.mass[w], spread += shared.variance[w], fewer += shared.count[w];
    all += shared.count[w];
  }
  const float rest = 1.f - asked.top_p, wanted = by_count ? float(asked.count) : 0.f;
  int low = 0, high = GUESS_BINS;
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    const float weight = edge(BINS * thread + i) * each, from = float(all - fewer) * each;
    const float error = spread + weight * weight;  // one column more may be there, unseen
    const bool is_low = (by_mass && IsCertain(rest - below, error)) ||
                        (by_count && IsCertain(from - wanted - 3.f * each, wanted * each));
    // Where nothing was seen there may be twelve times what one of the sample stands for, by a chance of 6e-6.
    const bool is_high = (!by_mass || IsCertain(below - rest, error)) &&
                         (!by_count || IsCertain(wanted - from - 8.f * each, (from + each) * each));
    if (is_low) low = BINS * thread + i;
    if (is_high && high == GUESS_BINS) high = BINS * thread + i;
    below += mass[i], spread += variance[i], fewer += count[i];
  }
  low = int(ptx::ReduceMax(uint32_t(low))), high = int(ptx::ReduceMin(uint32_t(high)));
  if (lane == 0 && low != 0) atomicMax(&shared.low, low);
  if (lane == 0 && high != GUESS_BINS) atomicMin(&shared.high, high);
  __syncthreads();
  // Columns within; where they are many, those of a few bins tell.
  const int bin = max(shared.low, 1) + lane;  // but for the lowest bin, which 0 is in
  float within = 0.f;
  if (bin < shared.high) within = by_count ? float(shared.counts[bin]) : __fdividef(shared.quanta[bin], edge(bin + 1));
  expected = float(ptx::ReduceAdd(uint32_t(by_count ? within : within * (1.f / 2147483648.f)))) * each;
  const bool is_open = shared.high == GUESS_BINS || (asked.top_k_first && by_count);
  return {shared.low == 0 ? lowest : edge(shared.low), is_open ? 2.f : edge(shared.high)};
}

}  // namespace sampling
}  // namespace flashinfer
