// SPDX-License-Identifier: Apache-2.0
// State update by replay on the CPU; parameters in ../ssu_replay.h. A row of the state goes token by token through the live rows
// and the new ones, in registers and L1; heads of sequences are shared among the threads.
//   test  pytest tests/recurrent -k replay
#pragma once
#include <algorithm>

#include "../ssu_replay.h"
#include "state_row.h"

namespace flashinfer {
namespace recurrent {

constexpr int BAD_REPLAY_SLOT = 1, BAD_REPLAY_SEQLEN = 2;

inline int64_t RingRow(int64_t start, int64_t i, int64_t length) { return ((start + i) % length + length) % length; }

template <typename State, typename Input>
Status ReplayUpdate(const ReplayParams<State, Input>& p, Stream) {
  using namespace cpu_step;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t slot = p.source.data == nullptr ? n : p.source.At(n);
    if (slot != p.pad && (slot < 0 || slot >= p.slots)) return BAD_REPLAY_SLOT;
    if (p.cu_seqlens.data == nullptr) continue;
    const int64_t begin = p.cu_seqlens.At(n), end = p.cu_seqlens.At(n + 1);
    if (begin < 0 || end < begin || end - begin > p.tokens || end > p.total_tokens) return BAD_REPLAY_SEQLEN;
  }
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
  const int64_t width = p.dstate;
  cpu::ParallelFor(int64_t(p.sequences) * p.heads, int64_t(p.dim) * width * 8, [&](int64_t first, int64_t last) {
    const cpu::Scratch s(width), b(REPLAY_ROWS * width), c(MAX_REPLAYED * width);
    float dt[REPLAY_ROWS], decay[REPLAY_ROWS];
    for (int64_t item = first; item < last; ++item) {
      const int64_t n = item / p.heads, h = item % p.heads, group = h / p.heads_per_group;
      int64_t begin_token = 0, begin_batch = n, tokens = p.tokens;
      if (p.cu_seqlens.data != nullptr) {
        begin_token = p.cu_seqlens.At(n);
        begin_batch = 0;
        tokens = p.cu_seqlens.At(n + 1) - begin_token;
      }
      const int64_t slot = p.source.data == nullptr ? n : p.source.At(n);
      if (tokens <= 0 || slot == p.pad) continue;
      const int64_t live = std::min<int64_t>(std::max<int64_t>(p.live[slot], 0), p.window), rows = live + tokens;
      const int64_t start = p.ring_start[slot];
      const auto at = [&](const auto& a, int64_t t) { return begin_batch * a.batch + (begin_token + t) * a.token; };
      const auto ring_at = [&](const auto& a, int64_t owner, int64_t i) {
        return a.data + slot * a.slot + owner * a.head + RingRow(start, i, p.length) * a.row;
      };
      for (int64_t i = 0; i < rows; ++i) {
        if (i < live) {
          dt[i] = *ring_at(p.dt_ring, h, i);
          LoadRow(ring_at(p.b_ring, group, i), 1.f, width, &b[i * width]);
        } else {
          dt[i] = WeightAt(p.dt, at(p.dt, i - live) + h * p.dt.head);
          if (p.dt_bias.data != nullptr) dt[i] += WeightAt(p.dt_bias, h * p.dt_bias.head);
          if (p.softplus) dt[i] = Softplus(dt[i]);
          const Input* from = p.b.data + at(p.b, i - live) + group * p.b.head;
          LoadRow(from, 1.f, width, &b[i * width]);
          LoadRow(p.c.data + at(p.c, i - live) + group * p.c.head, 1.f, width, &c[(i - live) * width]);
          *ring_at(p.dt_ring, h, i) = dt[i];
          if (h % p.heads_per_group == 0) std::copy_n(from, width, ring_at(p.b_ring, group, i));
        }
        decay[i] = std::exp(Mamba2Rule::LogDecay(dt[i], p.a[h * p.a_head]));
      }
      for (int64_t row = 0; row < p.dim; ++row) {
        float scale = 1.f;
        if constexpr (IsScaled<State>()) {
          scale = p.state.scale[slot * p.state.scale_slot + h * p.state.scale_head + row];
        }
        LoadRow(p.state.data + slot * p.state.slot + h * p.state.head + row * p.state.row, scale, width, &s[0]);
        for (int64_t i = 0; i < live; ++i) {
          const float x = float(ring_at(p.x_ring, h, i)[row]);
          Step(&s[0], decay[i], Mamba2Rule::Correction(x, 0.f, dt[i]), &b[i * width], width);
        }
        if (rows > p.window) StoreRow(p.state, slot, h, row, width, &s[0], options);
        const float d = p.d.data == nullptr ? 0.f : WeightAt(p.d, h * p.d.head + row * p.d.row);
        for (int64_t t = 0; t < tokens; ++t) {
          const int64_t i = live + t;
          const Input raw = p.x.data[at(p.x, t) + h * p.x.head + row];
          const float x = float(raw), added = Mamba2Rule::Correction(x, 0.f, dt[i]);
          float y = StepAndDot(&s[0], decay[i], added, &b[i * width], &c[t * width], width) + d * x;
          if (p.z.data != nullptr) {
            const float gate = float(p.z.data[at(p.z, t) + h * p.z.head + row]);
            y *= gate * Sigmoid(gate);
          }
          p.out.data[at(p.out, t) + h * p.out.head + row] = Input(y);
          ring_at(p.x_ring, h, i)[row] = raw;
        }
      }
    }
  });
  return 0;
}

template <typename State, typename Input>
Status Materialize(const MaterializeParams<State, Input>& p, Stream) {
  using namespace cpu_step;
  int64_t active = 0;
  while (active < p.active_count && p.active[active] >= 0) ++active;
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
  const int64_t width = p.dstate;
  cpu::ParallelFor(p.layers * active * p.heads, int64_t(p.dim) * width * 8, [&](int64_t first, int64_t last) {
    const cpu::Scratch s(width), b(MAX_REPLAYED * width);
    for (int64_t item = first; item < last; ++item) {
      const int64_t h = item % p.heads, layer = item / p.heads / active, group = h / p.heads_per_group;
      const int64_t request = p.active[item / p.heads % active];
      if (request >= p.requests) continue;
      const int64_t source = p.source[layer * p.requests + request], target = p.target[layer * p.requests + request];
      if (source == p.pad || target == p.pad || source < 0 || target < 0) continue;
      const int64_t live = std::min<int64_t>(std::max<int64_t>(p.live[request], 0), MAX_REPLAYED);
      const int64_t start = p.ring_start[request];
      StateArray<State> a{
          reinterpret_cast<State*>(p.state[layer]), p.state_slot[layer], int64_t(p.dim) * width, width, nullptr, 0, 0};
      if constexpr (IsScaled<State>()) {
        a.scale = reinterpret_cast<float*>(p.scale[layer]);
        a.scale_slot = p.scale_slot[layer];
        a.scale_head = p.dim;
      }
      const auto* x_ring =
          reinterpret_cast<const Input*>(p.x_ring[layer]) + source * p.x_slot[layer] + h * p.length * p.dim;
      const auto* b_ring =
          reinterpret_cast<const Input*>(p.b_ring[layer]) + source * p.b_slot[layer] + group * p.length * width;
      const auto* dt_ring = reinterpret_cast<const float*>(p.dt_ring[layer]) + source * p.dt_slot[layer] + h * p.length;
      const float decay_rate = reinterpret_cast<const float*>(p.a[layer])[h];
      for (int64_t i = 0; i < live; ++i)
        LoadRow(b_ring + RingRow(start, i, p.length) * width, 1.f, width, &b[i * width]);
      for (int64_t row = 0; row < p.dim; ++row) {
        const int64_t inside = h * a.head + row * a.row;
        float scale = 1.f;
        if constexpr (IsScaled<State>()) {
          scale = a.scale[source * a.scale_slot + h * a.scale_head + row];
          if (live == 0) a.scale[target * a.scale_slot + h * a.scale_head + row] = scale;
        }
        if (live == 0) {
          std::copy_n(a.data + source * a.slot + inside, width, a.data + target * a.slot + inside);
          continue;
        }
        LoadRow(a.data + source * a.slot + inside, scale, width, &s[0]);
        for (int64_t i = 0; i < live; ++i) {
          const int64_t at = RingRow(start, i, p.length);
          const float dt = dt_ring[at], x = float(x_ring[at * p.dim + row]);
          Step(&s[0], std::exp(Mamba2Rule::LogDecay(dt, decay_rate)), Mamba2Rule::Correction(x, 0.f, dt), &b[i * width],
               width);
        }
        StoreRow(a, target, h, row, width, &s[0], options);
      }
    }
  });
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
