// SPDX-License-Identifier: Apache-2.0
// First step of selection on the CPU: a value that the k largest elements of a row reach and few others do. One pass of
// vector compares then removes the elements below.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace flashinfer {
namespace cpu {

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

/// Return the k-th largest of the maxima of groups: at least k elements reach it. With 4k groups, about 1.15 k elements
/// do.
template <typename T>
inline float BoundOfGroups(const T* row, int64_t length, int64_t k, std::vector<float>& maxima) {
  const int64_t vecs = length / LANES, groups = std::max<int64_t>(4 * k, 256);
  const int64_t step = std::max<int64_t>(vecs * LANES / groups, 1);  // registers, whose lanes are a group each
  maxima.resize((vecs + step - 1) / step * LANES);
  for (int64_t begin = 0, at = 0; begin < vecs; begin += step, at += LANES) {
    Vec largest = Broadcast(MINUS_INF);
    for (int64_t i = begin; i < std::min(begin + step, vecs); ++i) {
      const Vec x = Load(row + i * LANES);
      largest = x > largest ? x : largest;
    }
    Store(&maxima[at], largest);
  }
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

/// Return a value estimated from a sample, which k elements plus four standard deviations are expected to reach.
template <typename T>
inline float BoundOfSample(const T* row, int64_t length, int64_t k, std::vector<float>& sample) {
  constexpr int64_t SAMPLES = 2048;
  sample.resize(SAMPLES);
  for (int64_t i = 0; i < SAMPLES; ++i) {
    const float x = float(row[i * length / SAMPLES]);
    sample[i] = x != x ? -MINUS_INF : x;
  }
  const double mean = double(SAMPLES) * k / length;
  const int64_t rank = std::min(SAMPLES - 1, int64_t(mean + 4 * std::sqrt(mean)) + 4);
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<float>());
  return sample[rank];
}

/// Return a value that k elements most likely reach, and not many more; NaN counts as reaching it. Returns minus
/// infinity if the row is too short, or k too large, for the bound to save time. `scratch` is overwritten.
template <typename T>
inline float BoundOfTopK(const T* row, int64_t length, int64_t k, std::vector<float>& scratch) {
  if (length < 8192 || k > length / 4) return MINUS_INF;
  const bool few = k <= 512 && k <= length / 16;
  return few ? BoundOfGroups(row, length, k, scratch) : BoundOfSample(row, length, k, scratch);
}

/// Return a mask with a bit for each lane that is not below the threshold. NaN is not below it.
inline uint32_t NotBelow(const Vec& x, float threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(threshold), _CMP_NLT_UQ);
#elif defined(__AVX__)
  const __m256 is_not = _mm256_cmp_ps(reinterpret_cast<__m256>(x), _mm256_set1_ps(threshold), _CMP_NLT_UQ);
  return uint32_t(_mm256_movemask_ps(is_not));
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= uint32_t(!(x[i] < threshold)) << i;
  return bits;
#endif
}

/// Call take(i, x) for each element that is not below the threshold, in ascending order of i.
template <typename T, typename Take>
inline void ForEachNotBelow(const T* row, int64_t length, float threshold, const Take& take) {
  ForEachVec(length, [&](int64_t first, auto lanes) {
    const Vec values = Load(row + first, lanes);
    uint32_t bits = NotBelow(values, threshold);
    if constexpr (std::is_same_v<decltype(lanes), SomeLanes>) bits &= (1u << lanes.count) - 1;
    if (bits == 0) return;
    float x[LANES];
    Store(x, values);
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      take(first + lane, x[lane]);
    }
  });
}

}  // namespace cpu
}  // namespace flashinfer
