// SPDX-License-Identifier: Apache-2.0
// Gated delta rule over packed requests on the CPU, token by token: for each row s of a state (channel v, 128 keys)
//   s *= g;  u = beta (v - s.k);  s += u k;  o = scale s.q
// A thread has some rows of a head, which stay in its first cache. Arithmetic is fp32.
//   test  pytest tests/recurrent/test_gdn_prefill.py
#pragma once
#include <cmath>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "../chunk/params.h"
#include "../rules.h"

namespace flashinfer {
namespace recurrent {
namespace cpu_delta {

constexpr int ROWS = 16;  // rows of a state that are computed together
constexpr int VECS = DIM / cpu::LANES;

struct Row {
  cpu::Vec x[VECS];
};

template <typename T>
inline Row LoadRow(const T* from) {
  Row row;
  for (int i = 0; i < VECS; ++i) row.x[i] = cpu::Load(from + i * cpu::LANES);
  return row;
}

inline float Dot(const Row& a, const Row& b) {
  cpu::Vec sum{};
  for (int i = 0; i < VECS; ++i) sum += a.x[i] * b.x[i];
  float total = 0.f;
  for (int i = 0; i < cpu::LANES; ++i) total += sum[i];
  return total;
}

/// Call f(a value of the type of the states).
template <typename F>
void WithStateType(StateType type, const F& f) {
  switch (type) {
    case StateType::kF32:
      return f(float{});
    case StateType::kBf16:
      return f(cpu::bfloat16{});
    case StateType::kF16:
      return f(cpu::float16{});
    case StateType::kE4M3:
      return f(cpu::float8_e4m3{});
    case StateType::kE5M2:
      return f(cpu::float8_e5m2{});
  }
}

inline void LoadState(float* s, const States& states, int64_t slot, int head, int row) {
  WithStateType(states.type, [&](auto zero) {
    using Type = decltype(zero);
    const Type* const from = static_cast<const Type*>(states.data) + slot * states.slot + head * states.head;
    for (int v = 0; v < ROWS; ++v) {
      for (int k = 0; k < DIM; ++k) s[v * DIM + k] = float(from[(row + v) * states.v + k * states.k]);
    }
  });
}

inline void StoreState(const float* s, const States& states, int64_t slot, int head, int row) {
  WithStateType(states.type, [&](auto zero) {
    using Type = decltype(zero);
    Type* const to = static_cast<Type*>(states.data) + slot * states.slot + head * states.head;
    for (int v = 0; v < ROWS; ++v) {
      for (int k = 0; k < DIM; ++k) to[(row + v) * states.v + k * states.k] = Type(s[v * DIM + k]);
    }
  });
}

/// Compute rows [row, row + ROWS) of a head of a request.
template <typename T>
void ScanRows(const DeltaParams<T>& p, int number, int head, int row) {
  const Request request = p.RequestOf(number);
  if (request.length == 0) return;
  const int q_head = head / (p.num_heads / p.num_q_heads), k_head = head / (p.num_heads / p.num_k_heads);
  const int v_head = head / (p.num_heads / p.num_v_heads);
  alignas(64) float s[ROWS * DIM] = {};
  const int64_t slot = p.slots[number];
  if (p.initial.data != nullptr) LoadState(s, p.initial, slot, head, row);
  for (int64_t i = 0; i < request.length; ++i) {
    const int64_t token = request.begin + i;
    const Row k = LoadRow(p.k + (token * p.num_k_heads + k_head) * DIM);
    const Row q = LoadRow(p.q + (token * p.num_q_heads + q_head) * DIM);
    const T* const v = p.v + (token * p.num_v_heads + v_head) * DIM + row;
    const float decay = p.g == nullptr ? 1.f : p.g[token * p.num_heads + head];
    const float beta = p.beta == nullptr ? 1.f : p.beta[token * p.num_heads + head];
    T* const o = p.o + (token * p.num_heads + head) * DIM + row;
    for (int r = 0; r < ROWS; ++r) {
      Row state = LoadRow(s + r * DIM);
      for (int j = 0; j < VECS; ++j) state.x[j] *= decay;
      const float u = GatedDeltaRule::Correction(float(v[r]), Dot(state, k), beta);
      for (int j = 0; j < VECS; ++j) {
        state.x[j] += u * k.x[j];
        cpu::Store(s + r * DIM + j * cpu::LANES, state.x[j]);
      }
      o[r] = T(p.scale * Dot(state, q));
    }
    if (p.interval > 0 && (i + 1) % p.interval == 0) {
      StoreState(s, p.checkpoints, p.rows[number] + (i + 1) / p.interval - 1, head, row);
    }
  }
  if (p.final.data != nullptr) StoreState(s, p.final, slot, head, row);
}

}  // namespace cpu_delta

template <typename T>
Status GdnPrefill(const DeltaParams<T>& p, Stream) {
  constexpr int PARTS = DIM / cpu_delta::ROWS;
  const int64_t items = int64_t(p.requests) * p.num_heads * PARTS;
  const int64_t work = p.tokens / p.requests * cpu_delta::ROWS * DIM + 1;
  cpu::ParallelFor(items, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pair = i / PARTS;
      cpu_delta::ScanRows(p, int(pair / p.num_heads), int(pair % p.num_heads), int(i % PARTS) * cpu_delta::ROWS);
    }
  });
  return Status{};
}

template <typename T>
Status NormalizeRows(const T* in, T* out, int64_t rows, bool, Stream) {
  cpu::ParallelFor(rows, DIM, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const cpu_delta::Row row = cpu_delta::LoadRow(in + i * DIM);
      const float factor = 1.f / std::sqrt(cpu_delta::Dot(row, row) + 1e-6f);
      for (int j = 0; j < cpu_delta::VECS; ++j) cpu::Store(out + i * DIM + j * cpu::LANES, row.x[j] * factor);
    }
  });
  return Status{};
}

}  // namespace recurrent
}  // namespace flashinfer
