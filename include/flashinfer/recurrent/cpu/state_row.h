// SPDX-License-Identifier: Apache-2.0
// Rows of a Mamba-2 state on the CPU: conversion to and from floats, and the step of one token.
//   test  pytest tests/recurrent -k "ssu or replay"
#pragma once
#include <cmath>
#include <type_traits>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "../arrays.h"
#include "../round.h"
#include "../rules.h"

namespace flashinfer {
namespace recurrent {
namespace cpu_step {

using cpu::ForEachVec;
using cpu::Vec;

/// Largest code of a scaled type; 0 for types without a scale.
template <typename State>
constexpr float CodeMax() {
  if (std::is_same_v<State, int16_t>) return 32767.f;
  if (std::is_same_v<State, int8_t>) return 127.f;
  if (std::is_same_v<State, cpu::float8_e4m3>) return 448.f;
  return 0.f;
}
template <typename State>
constexpr bool IsScaled() {
  return CodeMax<State>() > 0.f;
}

struct StoreOptions {
  bool is_random;
  int64_t seed;
  int rounds;
};

template <typename State>
inline void LoadRow(const State* from, float scale, int64_t n, float* to) {
  if constexpr (std::is_integral_v<State>) {
    for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]) * scale;
  } else {
    ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(from + i, lanes) * scale, lanes); });
  }
}

template <typename State>
inline State RoundBy(float x, uint32_t random) {
  State y{};
  if constexpr (std::is_same_v<State, cpu::float16>) {
    y.bits = RoundToHalf(x, random);
  } else if constexpr (std::is_same_v<State, cpu::float8_e4m3>) {
    y.bits = RoundToE4M3(x, random);
  } else if constexpr (std::is_same_v<State, int8_t>) {
    const float r = RoundToInteger(x, random);
    y = int8_t(r < -127.f ? -127.f : r > 127.f ? 127.f : r);
  }
  return y;
}

/// Store a row. Random words are counted from the row's position in the array.
template <typename State>
inline void StoreRow(const StateArray<State>& a, int64_t slot, int64_t head, int64_t row, int64_t n, const float* x,
                     const StoreOptions& options) {
  const int64_t offset = slot * a.slot + head * a.head + row * a.row;
  State* to = a.data + offset;
  float factor = 1.f;
  if constexpr (IsScaled<State>()) {
    float most = 0.f;
    for (int64_t i = 0; i < n; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    factor = most == 0.f ? 1.f : CodeMax<State>() / most;
    a.scale[slot * a.scale_slot + head * a.scale_head + row] = 1.f / factor;
  }
  constexpr bool CAN_BE_RANDOM =
      std::is_same_v<State, cpu::float16> || std::is_same_v<State, cpu::float8_e4m3> || std::is_same_v<State, int8_t>;
  if (CAN_BE_RANDOM && options.is_random) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = RoundBy<State>(x[i] * factor, RandomWord(options.seed, offset + i, options.rounds));
    }
  } else if constexpr (std::is_integral_v<State>) {
    const float limit = CodeMax<State>();
    for (int64_t i = 0; i < n; ++i) {
      const float r = std::nearbyint(x[i] * factor);
      to[i] = State(r < -limit ? -limit : r > limit ? limit : r);
    }
  } else {
    ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(x + i, lanes) * factor, lanes); });
  }
}

inline float WeightAt(const WeightArray& w, int64_t at) {
  switch (w.type) {
    case WeightType::kFloat:
      return static_cast<const float*>(w.data)[at];
    case WeightType::kBfloat16:
      return float(static_cast<const cpu::bfloat16*>(w.data)[at]);
    default:
      return float(static_cast<const cpu::float16*>(w.data)[at]);
  }
}

/// s = s * decay + added * b, for one decay or one for each column.
inline void Step(float* s, float decay, float added, const float* b, int64_t n) {
  ForEachVec(n, [&](int64_t i, auto lanes) {
    cpu::Store(s + i, cpu::Load(s + i, lanes) * decay + cpu::Load(b + i, lanes) * added, lanes);
  });
}
inline void Step(float* s, const float* a, int64_t a_stride, float dt, float added, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) s[i] = s[i] * std::exp(Mamba2Rule::LogDecay(dt, a[i * a_stride])) + added * b[i];
}

inline float Dot(const float* s, const float* c, int64_t n) {
  cpu::RunningSum sum;
  ForEachVec(n, [&](int64_t i, auto lanes) { sum.Add(cpu::Load(s + i, lanes) * cpu::Load(c + i, lanes)); });
  return sum.Total();
}

/// s = s * decay + added * b, and return the product of the new s with c: one pass.
inline float StepAndDot(float* s, float decay, float added, const float* b, const float* c, int64_t n) {
  cpu::RunningSum sum;
  ForEachVec(n, [&](int64_t i, auto lanes) {
    const Vec next = cpu::Load(s + i, lanes) * decay + cpu::Load(b + i, lanes) * added;
    cpu::Store(s + i, next, lanes);
    sum.Add(next * cpu::Load(c + i, lanes));
  });
  return sum.Total();
}

}  // namespace cpu_step
}  // namespace recurrent
}  // namespace flashinfer
