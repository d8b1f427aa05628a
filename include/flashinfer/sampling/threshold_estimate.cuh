// SPDX-License-Identifier: Apache-2.0
// Estimate of the threshold of a filter from a sample of a row of probabilities: 4096 columns, spread over the row, are
// counted in bins of keys. The mass below the threshold is estimated, since it is spread over many light columns; a
// sample says little about the few heavy columns above. Rows are assumed to be normalised. A wrong estimate costs time,
// never correctness.
#pragma once
#include "block_scan.cuh"
#include "row_segments.cuh"

namespace flashinfer {
namespace sampling {

constexpr int ESTIMATE_BINS = 512;                    // 16 bins per octave, from 2^-31 on
constexpr int ESTIMATE_SHIFT = 19;                    // right shift that turns a key into a bin
constexpr uint32_t ESTIMATE_FIRST = (ONE - 31) << 4;  // shifted key of the first bin
constexpr int ESTIMATE_SAMPLES = 4096;                // sampled columns; a warp loads 32 neighbouring ones
constexpr int ESTIMATE_LONG = 196608;                 // rows with more columns have a sample of twice the size
constexpr float ESTIMATE_DEVIATIONS = 4.f;            // standard deviations on either side of the range

/// Parameters of the filter of one output.
struct RequestedFilter {
  uint64_t count;  // a kept column has fewer columns above it
  float top_p;
  bool by_mass;
  bool top_k_first;  // top_p applies to the columns that top-k keeps

  /// True if top_p applies to the mass of the whole row.
  __device__ __forceinline__ bool ByTotal() const { return top_k_first && count == UNLIMITED; }
};

/// Range of weights that contains the threshold: weights from `high` on are kept, weights below `low` are not.
struct WeightRange {
  float low, high;
};

struct EstimateShared {
  uint32_t quanta[ESTIMATE_BINS], counts[ESTIMATE_BINS];
  float mass[WIDE_THREADS / 32], variance[WIDE_THREADS / 32];
  uint32_t count[WIDE_THREADS / 32];
  int32_t low, high;
};

/// z-test: true if `excess` is at least ESTIMATE_DEVIATIONS standard deviations.
__device__ __forceinline__ bool IsSignificant(float excess, float variance) {
  return excess >= 0.f && excess * excess >= ESTIMATE_DEVIATIONS * ESTIMATE_DEVIATIONS * variance;
}

/// Count a sample of the row in bins, by mass or count or both. Returns the number of columns that one sampled column
/// stands for.
template <int THREADS, bool MAY_BE_LONG, typename Sampled>
__device__ __forceinline__ float FillBins(const SegmentSource& source, bool by_mass, bool by_count,
                                          EstimateShared& shared, const Sampled& sampled) {
  constexpr int EACH = ESTIMATE_SAMPLES / THREADS, WARPS = THREADS / 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  float x[EACH];
  const uint32_t step = source.vocab / EACH & ~31u;
  const auto load = [&](uint32_t offset) {
    const float* const from = source.row + (offset & ~31u) + lane;
#pragma unroll
    for (int j = 0; j < EACH; ++j) x[j] = from[j * step];
  };
  load(warp * step / WARPS);
  for (int i = thread; i < ESTIMATE_BINS; i += THREADS) shared.quanta[i] = shared.counts[i] = 0;
  if (thread == 0) shared.low = 0, shared.high = ESTIMATE_BINS;
  __syncthreads();
  const Scale scale(ONE);
  const auto bin_of = [](float weight) {  // a weight of 0 goes to the lowest bin, which does no harm
    return min(max(int(Bits(weight) >> ESTIMATE_SHIFT) - int(ESTIMATE_FIRST), 0), ESTIMATE_BINS - 1);
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
  const bool is_long = MAY_BE_LONG && source.vocab > ESTIMATE_LONG;
  if (is_long) {
    load((2 * warp + 1) * step / (2 * WARPS));
#pragma unroll
    for (int j = 0; j < EACH; ++j) x[j] = Positive(x[j]);
    add();
  }
  __syncthreads();
  return float(source.vocab) * (is_long ? 0.5f / ESTIMATE_SAMPLES : 1.f / ESTIMATE_SAMPLES);
}

/// Estimate the range of the threshold. All columns are in the range where they are at most `most_listed`; `expected`
/// becomes the expected number of columns in the range, or more. sampled() is called once the sample is loaded.
template <int THREADS, bool MAY_BE_LONG, typename Sampled>
__device__ __forceinline__ WeightRange EstimateRange(const SegmentSource& source, const RequestedFilter& requested,
                                                     int most_listed, float& expected, EstimateShared& shared,
                                                     const Sampled& sampled) {
  constexpr int WARPS = THREADS / 32, BINS = ESTIMATE_BINS / THREADS;  // bins per thread
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float lowest = FromBits(1);
  expected = 0.f;
  const bool by_count = requested.count != UNLIMITED, by_mass = requested.by_mass || requested.ByTotal();
  if (!by_count && !by_mass) return {lowest, lowest};
  if (source.vocab <= most_listed) return {lowest, 2.f};
  const float each = FillBins<THREADS, MAY_BE_LONG>(source, by_mass, by_count, shared, sampled);
  // Each thread has one or two bins. For the lower edge of each: the sampled mass below it, and the number of columns
  // from it on.
  const auto edge = [&](int bin) { return FromBits((ESTIMATE_FIRST + bin) << ESTIMATE_SHIFT); };
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
  // Not BlockExclusiveScan, which would unroll this loop over sums of two types: every token waits for this code.
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
  const float rest = 1.f - requested.top_p, wanted = by_count ? float(requested.count) : 0.f;
  int low = 0, high = ESTIMATE_BINS;
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    const float weight = edge(BINS * thread + i) * each, from = float(all - fewer) * each;
    const float error = spread + weight * weight;  // one more column may be there, unseen
    const bool is_low = (by_mass && IsSignificant(rest - below, error)) ||
                        (by_count && IsSignificant(from - wanted - 3.f * each, wanted * each));
    // An empty bin may hide up to twelve times the columns that one sample stands for, with probability 6e-6.
    const bool is_high = (!by_mass || IsSignificant(below - rest, error)) &&
                         (!by_count || IsSignificant(wanted - from - 8.f * each, (from + each) * each));
    if (is_low) low = BINS * thread + i;
    if (is_high && high == ESTIMATE_BINS) high = BINS * thread + i;
    below += mass[i], spread += variance[i], fewer += count[i];
  }
  low = int(ptx::ReduceMax(uint32_t(low))), high = int(ptx::ReduceMin(uint32_t(high)));
  if (lane == 0 && low != 0) atomicMax(&shared.low, low);
  if (lane == 0 && high != ESTIMATE_BINS) atomicMin(&shared.high, high);
  __syncthreads();
  // Expected columns in the range; the bins of one warp are enough to tell whether there are many.
  const int bin = max(shared.low, 1) + lane;  // skip the lowest bin, which holds the zeros
  float within = 0.f;
  if (bin < shared.high) within = by_count ? float(shared.counts[bin]) : __fdividef(shared.quanta[bin], edge(bin + 1));
  expected = float(ptx::ReduceAdd(uint32_t(by_count ? within : within * (1.f / 2147483648.f)))) * each;
  const bool is_open = shared.high == ESTIMATE_BINS || (requested.top_k_first && by_count);
  return {shared.low == 0 ? lowest : edge(shared.low), is_open ? 2.f : edge(shared.high)};
}

}  // namespace sampling
}  // namespace flashinfer
