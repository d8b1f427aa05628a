// SPDX-License-Identifier: Apache-2.0
// Where the threshold of a filter most likely is, from a sample of a row of probabilities: 4096 columns, spread over
// the row, in bins of keys. What is below the threshold is estimated, as it is many columns of little weight each; of
// the few heavy ones above, a sample says nothing. Rows are taken as normalised. A guess that is wrong costs time.
#pragma once
#include "scan.cuh"
#include "segment.cuh"

namespace flashinfer {
namespace sampling {

constexpr int GUESS_BINS = 2 * TOP_THREADS;        // 16 to an octave, from 2^-31 on
constexpr int GUESS_SHIFT = 19;                    // of keys
constexpr uint32_t GUESS_FIRST = (ONE - 31) << 4;  // key of the first bin, shifted
constexpr int GUESS_EACH = 16;                     // columns that a thread samples: a warp, 32 next to each other
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
  float mass[TOP_WARPS], variance[TOP_WARPS];
  uint32_t count[TOP_WARPS];
  int32_t low, high;
};

/// Whether `much` is more than could be by chance.
__device__ __forceinline__ bool IsCertain(float much, float variance) {
  return much >= 0.f && much * much >= GUESS_DEVIATIONS * GUESS_DEVIATIONS * variance;
}

/// All columns within the range where they are at most `most_listed`; `expected` of them, or more. sampled() is called
/// once the sample is loaded.
template <typename Sampled>
__device__ __forceinline__ Range GuessRange(const SegmentSource& source, const Asked& asked, int most_listed,
                                            float& expected, GuessShared& shared, const Sampled& sampled) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float lowest = FromBits(1);
  expected = 0.f;
  const bool by_count = asked.count != UNLIMITED, by_mass = asked.by_mass || asked.ByTotal();
  if (!by_count && !by_mass) return {lowest, lowest};
  if (source.vocab <= most_listed) return {lowest, 2.f};
  float x[GUESS_EACH];
  const uint32_t step = source.vocab / GUESS_EACH & ~31u;
  const float* const from = source.row + (warp * step / TOP_WARPS & ~31u) + lane;
#pragma unroll
  for (int j = 0; j < GUESS_EACH; ++j) x[j] = from[j * step];
  for (int i = thread; i < GUESS_BINS; i += TOP_THREADS) shared.quanta[i] = shared.counts[i] = 0;
  if (thread == 0) shared.low = 0, shared.high = GUESS_BINS;
  __syncthreads();
  const Scale scale(ONE);
  const auto bin_of = [](float weight) {  // that of 0 is the lowest, which does no harm
    return min(max(int(Bits(weight) >> GUESS_SHIFT) - int(GUESS_FIRST), 0), GUESS_BINS - 1);
  };
  uint32_t* const bins = by_mass ? shared.quanta : shared.counts;
#pragma unroll
  for (int j = 0; j < GUESS_EACH; ++j) x[j] = Positive(x[j]);
  sampled();
#pragma unroll
  for (int j = 0; j < GUESS_EACH; ++j) {
    atomicAdd(bins + bin_of(x[j]), by_mass ? QuantumOf(x[j], scale) : 1u);
  }
  if (by_mass && by_count) {
#pragma unroll
    for (int j = 0; j < GUESS_EACH; ++j) atomicAdd(shared.counts + bin_of(x[j]), 1u);
  }
  __syncthreads();
  // Each thread has two bins. Edge i of them: what the sample has below, and how many columns from there on.
  const auto edge = [&](int bin) { return FromBits((GUESS_FIRST + bin) << GUESS_SHIFT); };
  const float each = float(source.vocab) * (1.f / (GUESS_EACH * TOP_THREADS));  // columns for one of the sample
  const float unit = each * (1.f / 2147483648.f);
  float mass[2], variance[2];
  uint32_t count[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    mass[i] = float(shared.quanta[2 * thread + i]) * unit;
    variance[i] = mass[i] * edge(2 * thread + i + 1) * each;
    count[i] = shared.counts[2 * thread + i];
  }
  float below = WarpInclusiveScan(mass[0] + mass[1]), spread = WarpInclusiveScan(variance[0] + variance[1]);
  uint32_t fewer = WarpInclusiveScan(count[0] + count[1]), all = 0;
  if (lane == 31) shared.mass[warp] = below, shared.variance[warp] = spread, shared.count[warp] = fewer;
  __syncthreads();
  below -= mass[0] + mass[1], spread -= variance[0] + variance[1], fewer -= count[0] + count[1];
#pragma unroll 1
  for (int w = 0; w < TOP_WARPS; ++w) {
    if (w < warp) below += shared.mass[w], spread += shared.variance[w], fewer += shared.count[w];
    all += shared.count[w];
  }
  const float rest = 1.f - asked.top_p, wanted = by_count ? float(asked.count) : 0.f;
  int low = 0, high = GUESS_BINS;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float weight = edge(2 * thread + i) * each, from = float(all - fewer) * each;
    const float error = spread + weight * weight;  // one column more may be there, unseen
    const bool is_low = (by_mass && IsCertain(rest - below, error)) ||
                        (by_count && IsCertain(from - wanted - 3.f * each, wanted * each));
    const bool is_high = (!by_mass || IsCertain(below - rest, error)) &&
                         (!by_count || IsCertain(wanted - from - 3.f * each, from * each));
    if (is_low) low = 2 * thread + i;
    if (is_high && high == GUESS_BINS) high = 2 * thread + i;
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
