// SPDX-License-Identifier: Apache-2.0
// The k largest elements of rows on the CPU (meaning and parameters: topk.h). Rows over threads. A sample gives a value
// that a bit more than k elements should reach; one pass keeps those as numbers that order as the elements do, and
// nth_element ends it. Where the sample misled, all elements are kept.
//   test  pytest tests/topk      bench  python benchmarks/bench_topk.py
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "topk.h"

namespace flashinfer {
namespace cpu {

constexpr uint32_t NAN_KEY = 0xFFC00000;  // above that of infinity
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

/// An unsigned number that orders as x does.
inline uint32_t KeyOf(float x) {
  if (x != x) return NAN_KEY;
  const uint32_t bits = BitCast<uint32_t>(x + 0.0f);  // -0 becomes 0: they are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// An element as one number, the larger the earlier it is taken: value, then index.
struct Candidate {
  uint64_t order;
  Candidate() = default;
  Candidate(uint32_t key, uint32_t index, bool prefer_large)
      : order(uint64_t{key} << 32 | (prefer_large ? index : ~index)) {}
  uint32_t Key() const { return uint32_t(order >> 32); }
  uint32_t Index(bool prefer_large) const { return prefer_large ? uint32_t(order) : ~uint32_t(order); }
  bool operator<(const Candidate& other) const { return order > other.order; }
};

/// A value that somewhat more than k elements should reach: four standard deviations below the share of a sample.
template <typename T>
inline float SampleThreshold(const T* row, int64_t length, int64_t k, std::vector<float>& sample) {
  constexpr int64_t SAMPLES = 2048;
  if (length < 4 * SAMPLES || k > length / 4) return MINUS_INFINITY;
  sample.resize(SAMPLES);
  for (int64_t i = 0; i < SAMPLES; ++i) {
    const float x = float(row[i * length / SAMPLES]);
    sample[i] = x != x ? -MINUS_INFINITY : x;
  }
  const double mean = double(SAMPLES) * k / length;
  const int64_t rank = std::min(SAMPLES - 1, int64_t(mean + 4 * std::sqrt(mean)) + 4);
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<float>());
  return sample[rank];
}

/// Whether every lane is below the threshold; a NaN is not.
inline bool AllBelow(const Vec& x, float threshold) {
  const IntVec below = x < Broadcast(threshold);
  int64_t lanes[LANES / 2], all = -1;
  std::memcpy(lanes, &below, sizeof(below));
  for (const int64_t pair : lanes) all &= pair;
  return all == -1;
}

/// The elements that reach the threshold; NaN does.
template <typename T>
inline void Collect(const T* row, int64_t length, float threshold, bool prefer_large, std::vector<Candidate>& found) {
  found.clear();
  ForEachVec(length, [&](int64_t first, auto lanes) {
    const Vec values = Load(row + first, lanes);
    if (AllBelow(values, threshold)) return;
    float x[LANES];
    Store(x, values);
    const int64_t count = std::min<int64_t>(LANES, length - first);
    for (int64_t i = 0; i < count; ++i) {
      if (!(x[i] < threshold)) found.emplace_back(KeyOf(x[i]), uint32_t(first + i), prefer_large);
    }
  });
}

template <typename T>
inline void EmitTopK(const TopKParams<T>& p, int64_t row, int64_t slot, int32_t index, T value) {
  const int64_t at = row * p.k + slot;
  if (p.values != nullptr) p.values[at] = value;
  if (p.indices != nullptr) p.indices[at] = index;
  if (p.raw_indices != nullptr) p.raw_indices[at] = index;
  if (p.transformed != nullptr) p.transformed[at] = TransformIndex(p, row, index);
}

}  // namespace cpu

template <typename T>
Status TopK(const TopKParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows, p.width, [&](int64_t begin, int64_t end) {
    std::vector<Candidate> found;
    std::vector<float> sample;
    for (int64_t row = begin; row < end; ++row) {
      const TopKWindow window = WindowOf(p, row);
      const T* data = p.input + row * p.row_stride + window.start;
      const int64_t length = window.length, k = std::min<int64_t>(p.k, length);
      if (length <= p.k && p.order != TopKOrder::kByValue) {  // all of them, as they come
        for (int64_t i = 0; i < length; ++i) EmitTopK(p, row, i, int32_t(i), data[i]);
        for (int64_t i = length; i < p.k; ++i) EmitTopK(p, row, i, -1, T(0.0f));
        continue;
      }
      bool prefer_large = p.prefer_large_indices;
      const float threshold = SampleThreshold(data, length, k, sample);
      Collect(data, length, threshold, prefer_large, found);
      if (int64_t(found.size()) < k) Collect(data, length, MINUS_INFINITY, prefer_large, found);
      if (int64_t(found.size()) > k) {
        std::nth_element(found.begin(), found.begin() + k, found.end());
        found.resize(k);
      }
      if (p.order == TopKOrder::kByIndex) {
        std::sort(found.begin(), found.end(), [prefer_large](const Candidate& a, const Candidate& b) {
          return a.Index(prefer_large) < b.Index(prefer_large);
        });
      } else if (p.order == TopKOrder::kByValue) {
        if (prefer_large) {  // equal values are listed by ascending index, however they were chosen
          for (Candidate& c : found) c = Candidate(c.Key(), c.Index(true), false);
          prefer_large = false;
        }
        std::sort(found.begin(), found.end());
      }
      for (int64_t slot = 0; slot < k; ++slot) {
        const uint32_t index = found[slot].Index(prefer_large);
        EmitTopK(p, row, slot, int32_t(index), data[index]);
      }
    }
  });
  return 0;
}

}  // namespace flashinfer
