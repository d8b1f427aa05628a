// SPDX-License-Identifier: Apache-2.0
// One-shot all-reduce of CPU tensors over shared memory; formulas in params.h.
// A rank copies its input into its own memory and publishes the number of the call; then it waits for that number of all
// peers and reads their slots. Call n uses slot n % 2: a rank writes there again in call n + 2, which it enters after all
// peers have entered call n + 1, so have read what it wrote in call n. Flags count calls and wrap.
// With its input a rank publishes what it was asked for; ranks that differ find it before anything is written.
//   test  pytest tests/comm/test_allreduce.py
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#include "../../cpu/fp4.h"
#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "params.h"

namespace flashinfer {
namespace comm {

/// Arguments of a call that must be equal on all ranks.
struct Request {
  int64_t tokens, hidden, pattern, type;
  bool operator==(const Request& other) const { return std::memcmp(this, &other, sizeof(Request)) == 0; }
};

/// Head of the memory of a rank. Zero bytes are its first state.
struct HostHead {
  alignas(64) std::atomic<uint32_t> call;     ///< calls whose input is in place
  alignas(64) std::atomic<uint32_t> gave_up;  ///< 1 + the rank that this rank waited for in vain
  alignas(64) Request requests[2];
};
static_assert(sizeof(HostHead) <= HEAD_BYTES, "the head must fit in front of the slots");

/// Outcome of a call: done, or a number that Python turns into an exception or a further wait.
constexpr int64_t DONE = -1, REQUESTS_DIFFER = -2;  // 0 to 15: still waiting for that rank
constexpr int64_t GAVE_UP = 16;                     // GAVE_UP + 16 * a + b: rank a gave up waiting for rank b

inline HostHead* HeadOf(const PeerTable& peers, int rank) { return reinterpret_cast<HostHead*>(peers.memory[rank]); }

/// Wait until all peers have entered call `call`.
inline int64_t WaitForPeers(const PeerTable& peers, uint32_t call, int64_t wait_us) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(wait_us);
  for (int rank = 0; rank < peers.world; ++rank) {
    const HostHead* const head = HeadOf(peers, rank);
    for (uint32_t polls = 1; int32_t(head->call.load(std::memory_order_acquire) - call) < 0; ++polls) {
      if (polls % 64 != 0) continue;
      for (int other = 0; other < peers.world; ++other) {
        const uint32_t late = HeadOf(peers, other)->gave_up.load(std::memory_order_relaxed);
        if (late != 0) return GAVE_UP + 16 * other + (late - 1);
      }
      if (std::chrono::steady_clock::now() > deadline) return rank;
      sched_yield();  // there may be fewer cores than ranks
    }
  }
  return DONE;
}

template <typename T>
cpu::Vec RoundAs(const cpu::Vec& v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return cpu::Round<T>(v);
  }
}

/// Make rows of this rank (RowSource) and store them where the peers read them.
template <typename T>
void ShowRow(const AllReduceParams<T>& p, int64_t row, T* to) {
  using namespace cpu;
  const RowSource<T>& s = p.source;
  ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
    if (s.count == 0) {
      Store(to + i, Load(p.input + row * p.hidden + i, lanes) + 0.0f, lanes);  // -0.0 becomes +0.0
      return;
    }
    Vec sum{};
    for (int k = 0; k < s.count; ++k) {
      const int64_t at = s.index != nullptr ? row * s.count + k : k * p.tokens + row;
      const int64_t from = s.index != nullptr ? s.index[at] : at;
      if (from < 0) continue;
      const float weight = s.weights != nullptr         ? s.weights[at]
                           : s.typed_weights != nullptr ? float(s.typed_weights[at])
                                                        : 1.f;
      sum += Load(p.input + from * p.hidden + i, lanes) * weight;
    }
    sum = sum * s.factor;
    if (s.add != nullptr) sum += Load(s.add + row * p.hidden + i, lanes);
    Store(to + i, RoundAs<T>(sum) + 0.0f, lanes);
  });
}

inline float Largest(const cpu::Vec& v) {
  float lane[cpu::LANES], most = 0;
  cpu::Store(lane, v);
  for (float x : lane) most = x > most || std::isnan(x) ? x : most;
  return most;
}

/// Quantise a row by groups, each with an exponent.
template <typename T>
void StorePacked(const AllReduceParams<T>& p, int64_t token, const cpu::Scratch& row) {
  using namespace cpu;
  const int64_t groups = p.hidden / p.group;
  for (int64_t group = 0; group < groups; ++group) {
    float amax = 0;
    for (int64_t i = group * p.group; i < (group + 1) * p.group; ++i) {
      const float x = std::fabs(row[i]);
      amax = x > amax || std::isnan(x) ? x : amax;
    }
    const float wanted = amax / E4M3_LARGEST, scale = wanted < SMALLEST_SCALE ? SMALLEST_SCALE : wanted;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0), of_inverse = (254 - exponent) << 23;
    float inverse;
    std::memcpy(&inverse, &of_inverse, 4);
    ForEachVec(p.group, [&](int64_t i, auto lanes) {
      const int64_t at = group * p.group + i;
      Store(p.quant_out + token * p.hidden + at, Load(&row[at], lanes) * inverse, lanes);
    });
    uint8_t* const word = p.packed_out + 4 * (token + group / 4 * p.packed_stride);
    word[group % 4] = uint8_t(exponent);
    if (group + 1 == groups) {
      for (int64_t k = groups % 4; k % 4 != 0; ++k) word[k] = 0;
    }
    if (token + 1 == p.tokens && group % 4 == 0 && group + 4 < groups) {  // rows that only fill up the column
      std::memset(word + 4, 0, 4 * (p.packed_stride - p.tokens));
    }
  }
}

/// Quantise a row by blocks of 16 to FP4. `factor`: of the whole tensor.
template <typename T>
void StoreFp4(const AllReduceParams<T>& p, int64_t token, const cpu::Scratch& row, float factor) {
  using namespace cpu;
  const int64_t blocks = p.hidden / FP4_BLOCK;
  for (int64_t block = 0; block < blocks; ++block) {
    const float* const x = &row[block * FP4_BLOCK];
    float amax = 0;
    for (int i = 0; i < FP4_BLOCK; ++i) amax = std::fmax(amax, std::fabs(x[i]));
    const float8_e4m3 scale(factor * amax / E2M1_LARGEST);
    const bool is_zero = (scale.bits & 0x7F) == 0;
    const float multiple = is_zero ? 0.f : factor / float(scale);
    uint32_t code[FP4_BLOCK];
    for (int i = 0; i < FP4_BLOCK; i += LANES) {
      const UintVec bits = BitCast<UintVec>(Load(x + i));
      const Vec magnitude = BitCast<Vec>(bits & 0x7FFFFFFFu) * multiple;
      const UintVec rounded = Encode<E2M1Format, UintVec>(magnitude) | ((bits & 0x80000000u) >> 28);
      std::memcpy(code + i, &rounded, sizeof(rounded));
    }
    uint8_t* const to = p.fp4_out + token * p.hidden / 2 + block * FP4_BLOCK / 2;
    for (int i = 0; i < FP4_BLOCK / 2; ++i) to[i] = is_zero ? 0 : uint8_t(code[2 * i] | code[2 * i + 1] << 4);
    p.fp4_scales[p.fp4_grid.Index(token, block)] = scale.bits;
  }
  for (int64_t block = blocks; block < p.fp4_grid.PaddedCols(); ++block) {
    p.fp4_scales[p.fp4_grid.Index(token, block)] = 0;
  }
}

/// Sum, residual, norm and quantisation of one row. `row`: scratch of `hidden` floats.
template <typename T>
void ReduceRow(const AllReduceParams<T>& p, const T* const (&slots)[MAX_RANKS], int64_t token, const cpu::Scratch& row,
               float inv_scale) {
  using namespace cpu;
  const int64_t base = token * p.hidden;
  const bool is_fused = p.residual_out != nullptr;
  RunningSum squares;
  ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
    Vec sum = Load(slots[0] + base + i, lanes);
    for (int rank = 1; rank < p.peers.world; ++rank) sum += Load(slots[rank] + base + i, lanes);
    sum = RoundAs<T>(sum);
    const Vec residual = is_fused ? Load(p.residual_in + base + i, lanes) : Vec{};
    if (p.output != nullptr) Store(p.output + base + i, sum, lanes);
    if (!is_fused) return;
    sum = RoundAs<T>(sum + residual);
    Store(p.residual_out + base + i, sum, lanes);
    Store(&row[i], sum);
    squares.Add(Keep(sum * sum, lanes));
  });
  if (!is_fused) return;

  const float rstd = 1.0f / std::sqrt(squares.Total() / p.hidden + p.eps);
  float amax = 0;
  ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
    const Vec norm = RoundAs<T>(Load(&row[i]) * rstd * (Load(p.gamma + i, lanes) + p.weight_bias));
    if (p.norm_out != nullptr) Store(p.norm_out + base + i, norm, lanes);
    if (p.fp4_out != nullptr) Store(&row[i], Keep(norm, lanes));
    if (p.quant_out == nullptr) return;
    if (p.packed_out != nullptr) {
      Store(&row[i], Keep(norm, lanes));
      return;
    }
    if (p.scale_out == nullptr) {
      Store(p.quant_out + base + i, norm * inv_scale, lanes);
      return;
    }
    const Vec kept = Keep(norm, lanes);
    Store(&row[i], kept);
    const float most = Largest(kept < 0.f ? -kept : kept);
    amax = most > amax || std::isnan(most) ? most : amax;
  });
  if (p.fp4_out != nullptr) StoreFp4(p, token, row, p.scale != nullptr ? *p.scale : p.scale_value);
  if (p.packed_out != nullptr) StorePacked(p, token, row);
  if (p.scale_out == nullptr) return;
  const float scale = (amax < SMALLEST_AMAX ? SMALLEST_AMAX : amax) / E4M3_LARGEST;
  p.scale_out[token] = scale;
  ForEachVec(p.hidden, [&](int64_t i, auto lanes) { Store(p.quant_out + base + i, Load(&row[i]) / scale, lanes); });
}

/// Run one call, or a part of it: see DONE, REQUESTS_DIFFER, GAVE_UP.
template <typename T>
int64_t AllReduceOnHost(const AllReduceParams<T>& p) {
  HostHead* const own = HeadOf(p.peers, p.peers.rank);
  uint32_t call = own->call.load(std::memory_order_relaxed);
  const int64_t type = std::is_same_v<T, float> ? 0 : std::is_same_v<T, float16_t> ? 1 : 2;
  const Request request{p.tokens, p.hidden, p.pattern, type};
  if (!p.resume) {
    ++call;
    own->requests[call % 2] = request;
    T* const slot = reinterpret_cast<T*>(p.peers.memory[p.peers.rank] + HEAD_BYTES + call % 2 * p.slot_bytes);
    cpu::ParallelFor(p.tokens, p.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) ShowRow(p, row, slot + row * p.hidden);
    });
    own->call.store(call, std::memory_order_release);
  }
  const int64_t waiting = WaitForPeers(p.peers, call, p.wait_us);
  if (waiting != DONE) return waiting;

  const T* slots[MAX_RANKS];
  for (int rank = 0; rank < p.peers.world; ++rank) {
    if (!(HeadOf(p.peers, rank)->requests[call % 2] == request)) return REQUESTS_DIFFER;
    slots[rank] = reinterpret_cast<const T*>(p.peers.memory[rank] + HEAD_BYTES + call % 2 * p.slot_bytes);
  }
  const float inv_scale = 1.f / (p.scale != nullptr ? *p.scale : p.scale_value);
  cpu::ParallelFor(p.tokens, p.hidden, [&](int64_t begin, int64_t end) {
    const cpu::Scratch row(p.hidden);
    for (int64_t token = begin; token < end; ++token) ReduceRow(p, slots, token, row, inv_scale);
  });
  return DONE;
}

}  // namespace comm
}  // namespace flashinfer
