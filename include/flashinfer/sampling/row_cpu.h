// SPDX-License-Identifier: Apache-2.0
// A row of weights on the CPU: conversion from probabilities or logits, sums of segments, sampling.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "../cpu/parallel.h"
#include "../cpu/vec.h"
#include "threshold_cpu.h"

namespace flashinfer {
namespace cpu {

/// Write n numbers times `factor` to `products`. Returns the largest product; NaN is ignored.
inline float Multiply(const float* x, float factor, int64_t n, float* products) {
  constexpr int CHAINS = 4;  // independent chains of comparisons
  Vec largest[CHAINS];
  for (Vec& of_chain : largest) of_chain = Broadcast(MINUS_INF);
  const auto take = [&](int64_t i, int chain) {
    const Vec v = Load(x + i) * factor;
    Store(products + i, v);
    largest[chain] = v > largest[chain] ? v : largest[chain];
  };
  int64_t i = 0;
  for (; i + CHAINS * LANES <= n; i += CHAINS * LANES) {
    for (int chain = 0; chain < CHAINS; ++chain) take(i + chain * LANES, chain);
  }
  for (; i + LANES <= n; i += LANES) take(i, 0);
  float result = MINUS_INF;
  for (const Vec& of_chain : largest) {
    for (int lane = 0; lane < LANES; ++lane) result = of_chain[lane] > result ? of_chain[lane] : result;
  }
  for (; i < n; ++i) {
    products[i] = x[i] * factor;
    result = products[i] > result ? products[i] : result;
  }
  return result;
}

typedef double DoubleVec __attribute__((vector_size(2 * VEC_BYTES)));
typedef int64_t LongVec __attribute__((vector_size(2 * VEC_BYTES)));

/// Return v with lanes i and i ^ BIT exchanged.
template <int BIT, size_t... I>
inline Vec SwapLanes(const Vec& v, std::index_sequence<I...>) {
  return Shuffle<int(I ^ BIT)...>(v, v);
}
template <int BIT>
inline Vec SwapLanes(const Vec& v) {
  return SwapLanes<BIT>(v, std::make_index_sequence<LANES>{});
}

/// Return Sum4 of each group of four lanes in all of its lanes.
inline Vec SumGroups(const Vec& v) {
  const Vec pairs = v + SwapLanes<1>(v);
  return pairs + SwapLanes<2>(pairs);
}

/// Return a vector whose lane i is lane i of vector i % 4.
inline Vec Interleave(const Vec (&v)[4]) {
  IntVec lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i % 4;
  const Vec low = lane == 0 ? v[0] : v[1], high = lane == 2 ? v[2] : v[3];
  return lane < 2 ? low : high;
}

/// A row of weights with the sums that sampling needs. One per thread.
class Row {
 public:
  explicit Row(int64_t vocab)
      : n_(vocab),
        padded_((vocab + 4 * LANES - 1) / (4 * LANES) * (4 * LANES)),
        scratch_(padded_),
        weights_(&scratch_[0]) {
    segments_.resize((vocab + SEGMENT - 1) / SEGMENT);
    scales_.resize(segments_.size(), LogitScale(0.0f));
    shifts_.resize(segments_.size());
    for (int64_t i = vocab; i < padded_; ++i) weights_[i] = 0.0f;
  }

  float* weights() { return weights_; }
  /// Store the next weights in an external row of the same length. (The output of softmax: writing it twice costs less
  /// than a copy.)
  void HoldIn(float* row) {
    if (padded_ == n_) weights_ = row;
  }
  Selector& selector() { return selector_; }

  /// Compute weights from probabilities minus `minus` (null: nothing). Returns the largest.
  float SetWeights(const float* x, const float* minus) { return SetWeights(x, minus, 0, n_); }
  /// FromProbs for a range of columns that starts at a multiple of the vector length.
  float SetWeights(const float* x, const float* minus, int64_t begin, int64_t end) {
    float* w = weights() + begin;
    Vec largest{};
    const Vec zero{};
    ForEachVec(end - begin, [&](int64_t i, auto lanes) {
      Vec v = Load(x + begin + i, lanes);
      if (minus != nullptr) v = v - Load(minus + begin + i, lanes);
      v = v > zero ? v : zero;
      largest = v > largest ? v : largest;
      Store(w + i, v);
    });
    float result = 0.0f;
    for (int i = 0; i < LANES; ++i) result = std::max(result, largest[i]);
    return result;
  }

  /// Compute weights from logits times `factor`, relative to a power of two per segment; NaN is kept. Returns the sum
  /// of their masses.
  uint64_t SumUpLogits(const float* x, float factor) {
    threshold_ = 0.0f;
    emax_ = ONE;
    by_column_ = false;
    exponent_ = LEAST_EXPONENT;
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t begin = int64_t(s) * SEGMENT, n = std::min<int64_t>(SEGMENT, n_ - begin);
      float* w = weights() + begin;
      const float largest = Multiply(x + begin, factor, n, w);
      LogitScale scale = LogitScale::Near(largest);
      if (LogitScale::IsFar(largest)) {
        scale = LogitScale::Far(largest, [&] { return LargestProduct(x, factor); });
        for (int64_t i = 0; i < n; ++i) w[i] = scale.Brought(w[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) w[i] = scale.Weight(w[i]);
      segments_[s] = SumSegment(begin, std::min(begin + SEGMENT, padded_), double(MASS_OF_ONE));
      scales_[s] = scale;
      exponent_ = std::max(exponent_, scale.exponent);
    }
    total_ = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      shifts_[s] = scales_[s].ShiftTo(exponent_);
      total_ += segments_[s] >>= shifts_[s];
    }
    return total_;
  }

  /// Factor that makes the weights of a segment of SumUpLogits relative to the same power of two as their sum.
  float UnitOf(int64_t segment) const { return PowerOf2(scales_[segment].exponent - exponent_); }

  /// Sum the masses of the weights from `threshold` on. Returns the total.
  uint64_t SumUp(float threshold, int emax) {
    threshold_ = threshold;
    emax_ = emax;
    by_column_ = false;
    total_ = 0;
    // Units of mass per unit of weight: a power of two, so doubles are exact; truncated as MassOf does.
    const double unit = std::ldexp(1.0, 40 + ONE - emax);
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t begin = int64_t(s) * SEGMENT, end = std::min(begin + SEGMENT, padded_);
      segments_[s] = emax > 0 && emax < 250 ? SumSegment(begin, end, unit) : SumSegmentExactly(begin, end);
      total_ += segments_[s];
    }
    return total_;
  }

  /// SumUp with quanta of columns instead of masses.
  uint64_t SumUpByColumn(float threshold, int emax) {
    threshold_ = threshold;
    emax_ = emax;
    by_column_ = true;
    total_ = 0;
    const Scale scale(emax);
    const Vec low = Broadcast(threshold), zero{};
    const double unit = double(scale.first) * scale.second, magic = 4503599627370496.0;  // 2^52: adding it rounds
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t begin = int64_t(s) * SEGMENT, end = std::min(begin + SEGMENT, padded_);
      DoubleVec sum{};  // sums of integers below 2^43
      uint64_t few = 0;
      for (int64_t i = begin; i < end; i += LANES) {
        const Vec weight = Load(weights() + i);
        uint32_t bits = NotBelow(weight, threshold);
        if (__builtin_popcount(bits) <= LANES / 4) {  // few columns: faster one by one
          for (; bits != 0; bits &= bits - 1) few += QuantumOf(Kept(i + __builtin_ctz(bits)), scale);
          continue;
        }
        const Vec kept = weight >= low ? weight : zero;
        const DoubleVec quantum = (__builtin_convertvector(kept, DoubleVec) * unit + magic) - magic;
        sum += quantum < 4294967295.0 ? quantum : DoubleVec{} + 4294967295.0;
      }
      double quanta = 0.0;
      for (int i = 0; i < LANES; ++i) quanta += sum[i];
      total_ += segments_[s] = uint64_t(quanta) + few;
    }
    return total_;
  }

  /// Find(target) for probabilities x, read until the target is found.
  int64_t FindInProbs(const float* x, uint64_t target) {
    threshold_ = 0.0f;
    emax_ = ONE;
    by_column_ = false;
    total_ = 0;
    for (size_t s = 0; s < segments_.size() && total_ < target; ++s) {
      const int64_t begin = int64_t(s) * SEGMENT;
      SetWeights(x, nullptr, begin, std::min(begin + SEGMENT, n_));
      total_ += segments_[s] = SumSegment(begin, std::min(begin + SEGMENT, padded_), double(MASS_OF_ONE));
    }
    return Find(target);
  }

  /// Return the column that holds `target`; the last positive one for a target above the total; -1 if there is none.
  int64_t Find(uint64_t target) const {
    if (target > total_) {
      for (int64_t i = n_ - 1; i >= 0; --i) {
        if (Kept(i) > 0.0f) return i;
      }
      return -1;
    }
    size_t s = 0;
    for (; segments_[s] < target; ++s) target -= segments_[s];
    if (by_column_) {
      const Scale scale(emax_);
      for (int64_t i = int64_t(s) * SEGMENT;; ++i) {
        const uint64_t quantum = QuantumOf(Kept(i), scale);
        if (quantum >= target) return i;
        target -= quantum;
      }
    }
    uint64_t before = 0;
    const auto reaches = [&](float sum) { return (before + MassOf(sum, emax_)) >> shifts_[s] >= target; };
    for (int64_t i = int64_t(s) * SEGMENT;; i += 4) {
      const float group[4] = {Kept(i), Kept(i + 1), Kept(i + 2), Kept(i + 3)};
      const float sum = Sum4(group[0], group[1], group[2], group[3]);
      if (reaches(sum)) return i + ColumnWhere(group, reaches);
      before += MassOf(sum, emax_);
    }
  }

 private:
  float Kept(int64_t i) const {
    const float weight = i < n_ ? weights_[i] : 0.0f;
    return weight >= threshold_ && weight > 0.0f ? weight : 0.0f;
  }

  /// Return the largest logit times `factor`.
  float LargestProduct(const float* x, float factor) const {
    float largest = MINUS_INF;
    for (int64_t i = 0; i < n_; ++i) largest = x[i] * factor > largest ? x[i] * factor : largest;
    return largest;
  }

  uint64_t SumSegment(int64_t begin, int64_t end, double unit) const {
    const float* w = weights_;
    const Vec low = Broadcast(threshold_), limit = Broadcast(PowerOf2(emax_ - ONE + 4)), zero{};
    LongVec mass{};
    for (int64_t i = begin; i < end; i += 4 * LANES) {
      Vec sums[4];
      for (int j = 0; j < 4; ++j) {
        const Vec weight = Load(w + i + j * LANES), positive = weight > zero ? weight : zero;
        sums[j] = SumGroups(weight >= low ? positive : zero);
      }
      const Vec sum = Interleave(sums), limited = sum < limit ? sum : limit;
      mass += __builtin_convertvector(__builtin_convertvector(limited, DoubleVec) * unit, LongVec);
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; ++i) total += mass[i];
    return uint64_t(total);
  }

  uint64_t SumSegmentExactly(int64_t begin, int64_t end) const {
    uint64_t mass = 0;
    for (int64_t i = begin; i < end; i += 4)
      mass += MassOf(Sum4(Kept(i), Kept(i + 1), Kept(i + 2), Kept(i + 3)), emax_);
    return mass;
  }

  int64_t n_, padded_;
  Scratch scratch_;
  float* weights_;
  std::vector<uint64_t> segments_;  // shifted masses of segments
  std::vector<LogitScale> scales_;  // scales of the segments of SumUpLogits
  std::vector<int> shifts_;
  int exponent_ = 0;
  Selector selector_;
  float threshold_ = 0.0f;
  int emax_ = ONE;
  bool by_column_ = false;  // segments_ holds quanta
  uint64_t total_ = 0;
};

}  // namespace cpu
}  // namespace flashinfer
