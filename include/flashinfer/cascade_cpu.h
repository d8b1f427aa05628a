// SPDX-License-Identifier: Apache-2.0
// Merging attention states on the CPU (formulas and parameters: cascade.h). Heads of all rows over threads; the weights
// of a head are found first, then each v is read once, in order: bound by memory.
//   test  pytest tests/cascade      bench  python benchmarks/bench_cascade.py
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cascade.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer {
namespace cpu {

constexpr float LN_2 = 0.6931471806f;

/// Return the number to subtract from all scores: their maximum, or 0 if it is -inf, where the difference would be NaN.
inline float ScoreBase(float maximum) { return maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum; }

template <typename T>
inline T* RowOfV(const AttentionStates<T>& x, int64_t row, int64_t head) {
  return x.v + row * x.v_row_stride + head * x.v_head_stride;
}

template <typename T>
inline auto& ScoreOf(const AttentionStates<T>& x, int64_t row, int64_t head) {
  return x.s[row * x.s_row_stride + head * x.s_head_stride];
}

/// Replace `n` scores by 2^(s - base), in place, and return the sum.
inline float ScoresToWeights(float* s, int64_t n, float base) {
  float total = 0.0f;
  ForEachVec(n, [&](int64_t i, auto lanes) {
    const Vec weights = Keep(Exp((Load(s + i, lanes) - base) * LN_2), lanes);
    Store(s + i, weights, lanes);
    total += ReduceSum(weights);
  });
  return total;
}

}  // namespace cpu

template <typename T>
Status MergeState(const MergeStateParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows * p.heads, p.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / p.heads, head = piece % p.heads;
      if (p.mask != nullptr && p.mask[row * p.mask_stride] == 0) continue;
      const float s_a = ScoreOf(p.a, row, head), s_b = ScoreOf(p.b, row, head);
      const float maximum = std::fmax(s_a, s_b), base = ScoreBase(maximum);
      const float weight_a = std::exp2(s_a - base), weight_b = std::exp2(s_b - base), total = weight_a + weight_b;
      ScoreOf(p.out, row, head) = maximum + std::log2(total);
      const float factor_a = total == 0.0f ? 0.0f : weight_a / total;
      const float factor_b = total == 0.0f ? 0.0f : weight_b / total;
      const T *v_a = RowOfV(p.a, row, head), *v_b = RowOfV(p.b, row, head);
      T* out = RowOfV(p.out, row, head);
      ForEachVec(p.head_dim, [&](int64_t i, auto lanes) {
        // A state without weight is left out: its v may be anything, even NaN.
        const Vec a = factor_a == 0.0f ? Vec{} : Load(v_a + i, lanes);
        const Vec b = factor_b == 0.0f ? Vec{} : Load(v_b + i, lanes);
        Store(out + i, factor_a * a + factor_b * b, lanes);
      });
    }
  });
  return 0;
}

template <typename T>
Status AddSinks(const AddSinksParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows * p.heads, p.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / p.heads, head = piece % p.heads;
      float& s = ScoreOf(p.states, row, head);
      const float sink = p.sinks[head * p.sink_stride] / LN_2, maximum = std::fmax(s, sink), base = ScoreBase(maximum);
      const float weight = std::exp2(s - base), total = weight + std::exp2(sink - base);
      const float factor = total == 0.0f ? 0.0f : weight / total;
      s = maximum + std::log2(total);
      T* const v = RowOfV(p.states, row, head);
      ForEachVec(p.head_dim, [&](int64_t i, auto lanes) {
        Store(v + i, factor == 0.0f ? Vec{} : factor * Load(v + i, lanes), lanes);
      });
    }
  });
  return 0;
}

template <typename T>
Status MergeStates(const MergeStatesParams<T>& p, Stream) {
  using namespace cpu;
  int64_t most_states = p.num_states;
  if (p.indptr != nullptr) {
    for (int64_t row = 0; row < p.rows; ++row) {
      most_states = std::max<int64_t>(most_states, p.indptr[row + 1] - p.indptr[row]);
    }
  }
  ParallelFor(p.rows * p.heads, p.head_dim * std::max<int64_t>(most_states, 1), [&](int64_t begin, int64_t end) {
    const Scratch weights(most_states), sums(p.head_dim);
    float *weight = &weights[0], *sum = &sums[0];
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / p.heads, head = piece % p.heads;
      const int64_t first = p.indptr != nullptr ? p.indptr[row] : 0;
      const int64_t num_states = p.indptr != nullptr ? p.indptr[row + 1] - first : p.num_states;
      const float* s = &ScoreOf(p.in, row, head) + first * p.s_state_stride;
      const T* first_v = RowOfV(p.in, row, head) + first * p.v_state_stride;
      float maximum = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < num_states; ++i) {
        weight[i] = s[i * p.s_state_stride];
        maximum = std::fmax(maximum, weight[i]);
      }
      const float total = ScoresToWeights(weight, num_states, ScoreBase(maximum));
      ScoreOf(p.out, row, head) = maximum + std::log2(total);
      std::fill(sum, sum + p.head_dim, 0.0f);
      for (int64_t state = 0; state < num_states; ++state) {
        if (weight[state] == 0.0f) continue;  // its v may be anything, even NaN
        const float factor = weight[state] / total;
        const T* v = first_v + state * p.v_state_stride;
        ForEachVec(p.head_dim, [&](int64_t i, auto lanes) {
          Store(sum + i, Load(sum + i, lanes) + factor * Load(v + i, lanes), lanes);
        });
      }
      T* out = RowOfV(p.out, row, head);
      ForEachVec(p.head_dim, [&](int64_t i, auto lanes) { Store(out + i, Load(sum + i, lanes), lanes); });
    }
  });
  return 0;
}

}  // namespace flashinfer
