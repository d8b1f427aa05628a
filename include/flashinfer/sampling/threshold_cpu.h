// SPDX-License-Identifier: Apache-2.0
// Threshold of top-k and top-p on the CPU. A first pass removes the columns that are certainly below it: top-k leaves
// little more than k columns (cpu/top_k_bound.h), top-p the columns above a sampled bound, or those too heavy to be
// ignored. If many are left, a histogram of the upper bits of their keys gives the bin that contains the threshold; few
// columns, or those of the bin, are sorted.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "../cpu/top_k_bound.h"
#include "../sampling.h"
#include "fixed_point.h"

namespace flashinfer {
namespace cpu {

using namespace sampling;

template <typename T>
inline T ValueOf(const PerRow<T>& parameter, int64_t row) {
  return parameter.values == nullptr ? parameter.value : parameter.values[std::min(row, parameter.count - 1)];
}

/// Keys of some columns of a row.
struct Keys {
  const uint32_t* data;
  int64_t size;
};

/// Estimate a weight with at most `rest` of the mass below it, where the row has a mass of 1; 0 where the row is too
/// short for that to pay, or there is none. Uses bins of a sample, 16 per octave; `bins` is overwritten.
inline float BoundOfMass(const float* weights, int64_t n, float rest, std::vector<float>& bins) {
  constexpr int64_t PIECES = 256, PIECE = 16, SAMPLES = PIECES * PIECE;
  constexpr int SHIFT = 19, BINS = 2048;  // bins up to the weight 2
  constexpr float DEVIATIONS = 4.5f, LEAST = 16.0f, UNSEEN = 2.0f;
  if (n < 4 * SAMPLES) return 0.0f;
  bins.assign(BINS, 0.0f);
  for (int64_t i = 0; i < SAMPLES; ++i) {
    const int64_t piece = i / PIECE * (n / PIECE) / PIECES;
    bins[std::min<uint32_t>(Bits(weights[piece * PIECE + i % PIECE]) >> SHIFT, BINS - 1)] += 1.0f;
  }
  // Weights are overestimated by up to one bin; samples as heavy as a bin may have been missed below it.
  const float each = float(n) / float(SAMPLES);
  float left = float(SAMPLES), mass = 0.0f, square = 0.0f, low = 0.0f;
  for (uint32_t bin = 0; bin < BINS && left >= LEAST && each * mass <= rest; ++bin) {
    const float weight = FromBits((bin + 1) << SHIFT);
    const float deviation = DEVIATIONS * std::sqrt(square + UNSEEN * weight * weight);
    if (each * (mass + deviation) <= rest) low = FromBits(bin << SHIFT);
    left -= bins[bin];
    mass += bins[bin] * weight;
    square += bins[bin] * weight * weight;
  }
  return low;
}

/// Finds thresholds. One per thread: the histogram has 200 KB.
class Selector {
 public:
  /// Return the smallest key that the limits keep; the smallest of all if the limits are not reached. Keys of 0 do not
  /// count, unless the keys are SIGNED. Without QUANTA the limit on quanta is ignored and no sum is returned.
  template <bool SIGNED, bool QUANTA = !SIGNED>
  KeyThreshold Find(const Keys& keys, const FilterLimits& limits, const Scale& scale) {
    uint64_t above = 0, quanta_above = 0;
    candidates_.clear();
    if (keys.size <= FEW) {
      for (int64_t i = 0; i < keys.size; ++i) {
        if (SIGNED || keys.data[i] != 0) candidates_.push_back(keys.data[i]);
      }
    } else {
      TakeBin<SIGNED, QUANTA>(keys, limits, scale, above, quanta_above);
    }
    if (candidates_.empty()) return {1, 0};
    std::sort(candidates_.begin(), candidates_.end(), std::greater<>());
    size_t i = 0;
    while (true) {  // equal keys are kept or dropped together
      const uint32_t key = candidates_[i];
      for (; i < candidates_.size() && candidates_[i] == key; ++i) {
        ++above;
        if (QUANTA) quanta_above += QuantumOf(FromBits(key), scale);
      }
      if (i == candidates_.size() || above >= limits.count || quanta_above >= limits.quanta) return {key, quanta_above};
    }
  }

  /// Return the keys of those of n numbers that reach `low`; valid until the next call.
  template <typename KeyOf>
  Keys RowFilter(const float* x, int64_t n, float low, const KeyOf& key_of) {
    const uint32_t low_key = key_of(low);
    kept_.resize(std::max(kept_.size(), size_t(n) + 1));
    uint32_t* end = kept_.data();
    ForEachNotBelow(x, n, low, [&](int64_t, float value) {
      *end = key_of(value);
      end += *end >= low_key;  // -0 counts as 0, and some NaN are below all keys
    });
    return {kept_.data(), end - kept_.data()};
  }

  /// Keys of weights that reach `low` > 0; keys of weights are their bits.
  Keys RowFilter(const float* weights, int64_t n, float low) {
#if defined(__AVX512F__)
    kept_.resize(std::max(kept_.size(), size_t(n) + LANES));
    uint32_t* end = kept_.data();
    ForEachVec(n, [&](int64_t i, auto lanes) {
      const Vec x = Load(weights + i, lanes);
      const __mmask16 bits = NotBelow(x, low);
      _mm512_storeu_si512(end, _mm512_maskz_compress_epi32(bits, reinterpret_cast<__m512i>(x)));
      end += __builtin_popcount(bits);
    });
    return {kept_.data(), end - kept_.data()};
#else
    return RowFilter(weights, n, low, [](float weight) { return Bits(weight); });
#endif
  }

  /// Estimate a number that `count` of n numbers reach, and not many more; minus infinity if there is no such estimate.
  float Bound(const float* x, int64_t n, uint64_t count) {
    return count > uint64_t(n) ? MINUS_INF : BoundOfTopK(x, n, int64_t(count), scratch_);
  }
  float BoundOfMass(const float* x, int64_t n, float rest) { return cpu::BoundOfMass(x, n, rest, scratch_); }

 private:
  static constexpr int SHIFT = 18;
  static constexpr int64_t FEW = 256;  // sorting this many takes as long as a histogram

  /// Return the keys of the bin that contains the threshold, and the sums above it.
  template <bool SIGNED, bool QUANTA>
  void TakeBin(const Keys& keys, const FilterLimits& limits, const Scale& scale, uint64_t& above,
               uint64_t& quanta_above) {
    if (counts_.empty()) {
      counts_.resize(1 << (32 - SHIFT));
      quanta_.resize(1 << (32 - SHIFT));
    }
    const uint32_t *const begin = keys.data, *const end = keys.data + keys.size;
    uint32_t* const counts = counts_.data();
    uint64_t* const masses = quanta_.data();
    for (const uint32_t* key = begin; key < end; ++key) ++counts[*key >> SHIFT];
    if (QUANTA) {
      for (const uint32_t* key = begin; key < end; ++key) masses[*key >> SHIFT] += QuantumOf(FromBits(*key), scale);
    }
    if (!SIGNED) counts[0] -= std::count(begin, end, 0);
    uint32_t top = uint32_t(counts_.size()) - 1, bottom = 0;
    while (top > 0 && counts[top] == 0) --top;
    while (bottom < top && counts[bottom] == 0) ++bottom;
    if (counts[top] == 0) return;
    uint32_t bin = top;
    for (; bin > bottom && above + counts[bin] < limits.count && quanta_above + masses[bin] < limits.quanta; --bin) {
      above += counts[bin];
      quanta_above += masses[bin];
    }
    std::fill(counts + bottom, counts + top + 1, 0);
    std::fill(masses + bottom, masses + top + 1, 0);
    for (const uint32_t* key = begin; key < end; ++key) {
      if (*key >> SHIFT == bin && (SIGNED || *key != 0)) candidates_.push_back(*key);
    }
  }

  std::vector<uint32_t> counts_, candidates_, kept_;
  std::vector<uint64_t> quanta_;
  std::vector<float> scratch_;
};

/// Return the keys of a row that are enough to find the threshold of `limits`.
inline Keys KeysToSearch(const Keys& all, const FilterLimits& limits, float top_p, const Scale& scale,
                         Selector& selector) {
  const float* const weights = reinterpret_cast<const float*>(all.data);
  const int64_t n = all.size;
  if (const float low = selector.Bound(weights, n, limits.count); low > 0.0f) {
    const Keys kept = selector.RowFilter(weights, n, low);
    if (uint64_t(kept.size) >= limits.count) return kept;
  }
  if (limits.quanta == UNLIMITED) return all;
  // Columns below the second bound have less than half of the mass that may be left out.
  for (const float low : {selector.BoundOfMass(weights, n, 1.0f - top_p), 0.5f * (1.0f - top_p) / float(n)}) {
    if (!(low > 0.0f)) continue;
    const Keys kept = selector.RowFilter(weights, n, low);
    uint64_t kept_quanta = 0;
    for (int64_t i = 0; i < kept.size; ++i) kept_quanta += QuantumOf(FromBits(kept.data[i]), scale);
    if (kept_quanta >= limits.quanta) return kept;
  }
  return all;
}

/// Return the smallest probability that top-k and top-p keep. `searched`, if given, receives the keys of at least all
/// kept columns.
inline float FilterThreshold(const FilterParams& filter, int64_t row, int64_t output, const float* weights, int64_t n,
                             int emax, Selector& selector, Keys* searched = nullptr) {
  const int64_t top_k = ValueOf(filter.top_k, filter.top_k_by_output ? output : row);
  const float top_p = ValueOf(filter.top_p, filter.top_p_by_output ? output : row);
  const bool top_k_first = filter.filter == Filter::kTopKFirst;
  const FilterLimits limits{top_k >= n ? UNLIMITED : uint64_t(std::max<int64_t>(top_k, 1)),
                            top_k_first ? UNLIMITED : QuantaLimit(top_p, emax)};
  const Scale scale(emax);
  const bool limits_mass = top_k_first && !(top_p >= 1.0f);
  Keys keys{reinterpret_cast<const uint32_t*>(weights), n};
  if (searched != nullptr) *searched = keys;
  if (limits.quanta == UNLIMITED && !limits_mass && limits.count == UNLIMITED) return 0.0f;
  keys = KeysToSearch(keys, limits, top_p, scale, selector);
  if (searched != nullptr) *searched = keys;
  if (limits.quanta == UNLIMITED && !limits_mass) {
    return FromBits(selector.Find<false, false>(keys, limits, scale).key);
  }
  KeyThreshold found = selector.Find<false>(keys, limits, scale);
  if (limits_mass) {
    const Keys kept = selector.RowFilter(weights, n, FromBits(found.key));
    if (searched != nullptr) *searched = kept;
    found = selector.Find<false>(kept, {UNLIMITED, QuantaLimitOf(top_p, found.kept_quanta)}, scale);
  }
  return FromBits(found.key);
}

}  // namespace cpu
}  // namespace flashinfer
