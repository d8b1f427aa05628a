// SPDX-License-Identifier: Apache-2.0
// The k largest elements of rows on the CPU (meaning and parameters: topk.h). Rows over threads. One pass finds a value
// that a bit more than k elements reach (cpu/top_k_bound.h); another keeps those as numbers that order as the elements
// do, and nth_element ends it. Where the value was too high, all elements are kept.
//   test  pytest tests/topk      bench  python benchmarks/bench_topk.py
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/top_k_bound.h"
#include "cpu/vec.h"
#include "topk.h"

namespace flashinfer {
namespace cpu {

constexpr uint32_t NAN_KEY = 0xFFC00000;  // above that of infinity

/// Return an unsigned number with the same order as x.
inline uint32_t KeyOf(float x) {
  if (x != x) return NAN_KEY;
  const uint32_t bits = BitCast<uint32_t>(x + 0.0f);  // -0 becomes 0: they are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// Element as one number: value, then index. Larger numbers are selected first.
struct Candidate {
  uint64_t order;
  Candidate() = default;
  Candidate(uint32_t key, uint32_t index, bool prefer_large)
      : order(uint64_t{key} << 32 | (prefer_large ? index : ~index)) {}
  uint32_t Key() const { return uint32_t(order >> 32); }
  uint32_t Index(bool prefer_large) const { return prefer_large ? uint32_t(order) : ~uint32_t(order); }
  bool operator<(const Candidate& other) const { return order > other.order; }
};

/// Collect the elements that reach the threshold, including NaN.
template <typename T>
inline void Collect(const T* row, int64_t length, float threshold, bool prefer_large, std::vector<Candidate>& found) {
  found.clear();
  ForEachNotBelow(row, length, threshold,
                  [&](int64_t i, float x) { found.emplace_back(KeyOf(x), uint32_t(i), prefer_large); });
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
    std::vector<float> scratch;
    for (int64_t row = begin; row < end; ++row) {
      const TopKWindow window = WindowOf(p, row);
      const T* data = p.input + row * p.row_stride + window.start;
      const int64_t length = window.length, k = std::min<int64_t>(p.k, length);
      if (length <= p.k && p.order != TopKOrder::kByValue) {  // select all elements, in the order of the row
        for (int64_t i = 0; i < length; ++i) EmitTopK(p, row, i, int32_t(i), data[i]);
        for (int64_t i = length; i < p.k; ++i) EmitTopK(p, row, i, -1, T(0.0f));
        continue;
      }
      bool prefer_large = p.prefer_large_indices;
      const float threshold = BoundOfTopK(data, length, k, scratch);
      Collect(data, length, threshold, prefer_large, found);
      if (int64_t(found.size()) < k) Collect(data, length, MINUS_INF, prefer_large, found);
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
