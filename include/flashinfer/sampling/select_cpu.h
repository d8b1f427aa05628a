// SPDX-License-Identifier: Apache-2.0
// The threshold of top-k and top-p on the CPU: a histogram of the upper bits of the keys, then a sort of the columns in
// the bin that holds the threshold.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "../sampling.h"
#include "math.h"

namespace flashinfer {
namespace cpu {

using namespace sampling;

template <typename T>
inline T ValueOf(const PerRow<T>& parameter, int64_t row) {
  return parameter.values == nullptr ? parameter.value : parameter.values[std::min(row, parameter.count - 1)];
}

/// Where the columns of a row that a filter keeps begin.
struct Threshold {
  uint32_t key;
  uint64_t kept_quanta;  // of all columns at or above it
};

/// Finds thresholds. Made once per thread: the histogram has 200 KB.
class Selector {
 public:
  /// The key that has fewer than `count` of the n keys above it and less than `quanta` quanta; the smallest if none has
  /// more. Keys of 0 do not count, unless the keys are SIGNED. Without QUANTA there is no limit of them, and no result.
  template <bool SIGNED, bool QUANTA = !SIGNED>
  Threshold Find(const uint32_t* keys, int64_t n, uint64_t count, uint64_t quanta, const Scale& scale) {
    constexpr int SHIFT = 18;
    if (counts_.empty()) {
      counts_.resize(1 << (32 - SHIFT));
      quanta_.resize(1 << (32 - SHIFT));
    }
    uint32_t* const counts = counts_.data();
    uint64_t* const masses = quanta_.data();
    for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> SHIFT];
    if (QUANTA) {
      for (int64_t i = 0; i < n; ++i) masses[keys[i] >> SHIFT] += QuantumOf(FromBits(keys[i]), scale);
    }
    if (!SIGNED) counts[0] -= std::count(keys, keys + n, 0);
    uint32_t top = uint32_t(counts_.size()) - 1, bottom = 0;
    while (top > 0 && counts[top] == 0) --top;
    while (bottom < top && counts[bottom] == 0) ++bottom;
    if (counts[top] == 0) return {1, 0};
    uint64_t above = 0, quanta_above = 0;
    uint32_t bin = top;
    for (; bin > bottom && above + counts_[bin] < count && quanta_above + quanta_[bin] < quanta; --bin) {
      above += counts_[bin];
      quanta_above += quanta_[bin];
    }
    std::fill(counts_.begin() + bottom, counts_.begin() + top + 1, 0);
    std::fill(quanta_.begin() + bottom, quanta_.begin() + top + 1, 0);

    candidates_.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (keys[i] >> SHIFT == bin && (SIGNED || keys[i] != 0)) candidates_.push_back(keys[i]);
    }
    std::sort(candidates_.begin(), candidates_.end(), std::greater<>());
    size_t i = 0;
    while (true) {  // equal keys are kept together
      const uint32_t key = candidates_[i];
      for (; i < candidates_.size() && candidates_[i] == key; ++i) {
        ++above;
        if (QUANTA) quanta_above += QuantumOf(FromBits(key), scale);
      }
      if (i == candidates_.size() || above >= count || quanta_above >= quanta) return {key, quanta_above};
    }
  }

  /// The keys from `threshold` on, until the next call.
  const std::vector<uint32_t>& Keep(const uint32_t* keys, int64_t n, uint32_t threshold) {
    kept_.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (keys[i] >= threshold) kept_.push_back(keys[i]);
    }
    return kept_;
  }

 private:
  std::vector<uint32_t> counts_, candidates_, kept_;
  std::vector<uint64_t> quanta_;
};

/// The smallest probability that top-k and top-p keep.
inline float FilterThreshold(const FilterParams& filter, int64_t row, int64_t output, const float* weights, int64_t n,
                             int emax, Selector& selector) {
  const int64_t top_k = ValueOf(filter.top_k, filter.top_k_by_output ? output : row);
  const float top_p = ValueOf(filter.top_p, filter.top_p_by_output ? output : row);
  const uint64_t count = top_k >= n ? UNLIMITED : uint64_t(std::max<int64_t>(top_k, 1));
  const bool top_k_first = filter.filter == Filter::kTopKFirst;
  const uint64_t quanta = top_k_first ? UNLIMITED : QuantaLimit(top_p, emax);
  const auto* keys = reinterpret_cast<const uint32_t*>(weights);
  const Scale scale(emax);
  const bool limits_mass = top_k_first && !(top_p >= 1.0f);
  if (quanta == UNLIMITED && !limits_mass) {
    if (count == UNLIMITED) return 0.0f;
    return FromBits(selector.Find<false, false>(keys, n, count, quanta, scale).key);
  }
  Threshold found = selector.Find<false>(keys, n, count, quanta, scale);
  if (limits_mass) {
    const std::vector<uint32_t>& kept = selector.Keep(keys, n, found.key);
    const uint64_t limit = QuantaLimitOf(top_p, found.kept_quanta);
    found = selector.Find<false>(kept.data(), int64_t(kept.size()), UNLIMITED, limit, scale);
  }
  return FromBits(found.key);
}

}  // namespace cpu
}  // namespace flashinfer
