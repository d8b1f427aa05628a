// SPDX-License-Identifier: Apache-2.0
// Selective state update on the CPU; formulas and parameters in ../ssu.h. A thread has heads of sequences; a row of the state
// stays in L1 as floats from the first token to the last. Bound by memory for one token, by the products for several.
//   test  pytest tests/recurrent -k ssu
#pragma once
#include <algorithm>

#include "../ssu.h"
#include "state_row.h"

namespace flashinfer {
namespace recurrent {

/// Check slots and lengths, which CUDA kernels cannot report.
template <typename State, typename Input>
Status CheckSsuIndices(const SsuParams<State, Input>& p) {
  for (int64_t n = 0; p.cu_seqlens.data != nullptr && n < p.sequences; ++n) {
    const int64_t begin = p.cu_seqlens.At(n), end = p.cu_seqlens.At(n + 1);
    if (begin < 0 || end < begin || end > p.total_tokens) return BAD_SEQLEN;
  }
  const auto is_bad = [&](int64_t slot) { return slot != p.pad && (slot < 0 || slot >= p.slots); };
  for (const IndexArray* a : {&p.source, &p.target}) {
    for (int64_t n = 0; a->data != nullptr && n < p.sequences; ++n) {
      const int columns = p.accepted.data != nullptr ? a->columns : 1;
      for (int c = 0; c < columns; ++c) {
        // Columns past a sequence's tokens may hold anything.
        if (c > 0 && p.cu_seqlens.data != nullptr && c >= p.cu_seqlens.At(n + 1) - p.cu_seqlens.At(n)) break;
        if (is_bad(a->At(n, c))) return BAD_SLOT;
      }
    }
  }
  return 0;
}

template <typename State, typename Input>
Status SelectiveStateUpdate(const SsuParams<State, Input>& p, Stream) {
  using namespace cpu_step;
  if (const Status fault = CheckSsuIndices(p)) return fault;
  const StoreOptions options{p.seed != nullptr, p.seed != nullptr ? *p.seed : 0, p.rounds};
  const int64_t width = p.dstate;
  const int64_t work = int64_t(p.dim) * p.dstate * std::max(1, p.tokens);
  cpu::ParallelFor(int64_t(p.sequences) * p.heads, work, [&](int64_t begin, int64_t end) {
    const cpu::Scratch s(width);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / p.heads, h = item % p.heads, group = h / p.heads_per_group;
      int64_t begin_token = 0, begin_batch = n, tokens = p.tokens;
      if (p.cu_seqlens.data != nullptr) {
        begin_token = p.cu_seqlens.At(n);
        begin_batch = 0;
        tokens = p.cu_seqlens.At(n + 1) - begin_token;
      }
      if (tokens <= 0) continue;
      int64_t column = 0;
      if (p.accepted.data != nullptr) {
        column = std::min<int64_t>(std::max<int64_t>(p.accepted.At(n) - 1, 0), p.source.columns - 1);
      }
      const int64_t source = p.source.data == nullptr ? n : p.source.At(n, column);
      const bool has_state = source != p.pad && source >= 0 && source < p.slots;
      const bool has_index = p.kept.data != nullptr && p.kept_index.data != nullptr;
      const int64_t kept_row = has_index ? p.kept_index.At(n) : source;
      const bool keeps = p.kept.data != nullptr && has_state && kept_row >= 0 && kept_row < p.kept_rows;
      const int64_t final_target = p.target.data != nullptr ? p.target.At(n) : source;
      const IndexArray& targets = p.target.data != nullptr ? p.target : p.source;

      const cpu::Scratch b(tokens * width), c(tokens * width);
      const auto at = [&](const auto& a, int64_t t) { return begin_batch * a.batch + (begin_token + t) * a.token; };
      for (int64_t t = 0; t < tokens; ++t) {
        LoadRow(p.b.data + at(p.b, t) + group * p.b.head, 1.f, width, &b[t * width]);
        LoadRow(p.c.data + at(p.c, t) + group * p.c.head, 1.f, width, &c[t * width]);
      }
      for (int64_t row = 0; row < p.dim; ++row) {
        if (has_state) {
          float scale = 1.f;
          if constexpr (IsScaled<State>()) {
            scale = p.state.scale[source * p.state.scale_slot + h * p.state.scale_head + row];
          }
          LoadRow(p.state.data + source * p.state.slot + h * p.state.head + row * p.state.row, scale, width, &s[0]);
        } else {
          std::fill_n(&s[0], width, 0.f);
        }
        const bool has_bias = p.dt_bias.data != nullptr;
        const float bias = has_bias ? WeightAt(p.dt_bias, h * p.dt_bias.head + row * p.dt_bias.row) : 0.f;
        const float d = p.d.data == nullptr ? 0.f : WeightAt(p.d, h * p.d.head + row * p.d.row);
        const float* a = p.a + h * p.a_head + row * p.a_row;
        for (int64_t t = 0; t < tokens; ++t) {
          float dt = WeightAt(p.dt, at(p.dt, t) + h * p.dt.head + row * p.dt.row) + bias;
          if (p.softplus) dt = Softplus(dt);
          const float x = float(p.x.data[at(p.x, t) + h * p.x.head + row]);
          const float added = Mamba2Rule::Correction(x, 0.f, dt), *b_t = &b[t * width], *c_t = &c[t * width];
          float y = 0.f;
          if (p.a_column == 0) {
            y = StepAndDot(&s[0], std::exp(Mamba2Rule::LogDecay(dt, a[0])), added, b_t, c_t, width);
          } else {
            Step(&s[0], a, p.a_column, dt, added, b_t, width);
            y = Dot(&s[0], c_t, width);
          }
          y += d * x;
          if (p.z.data != nullptr) {
            const float gate = float(p.z.data[at(p.z, t) + h * p.z.head + row]);
            y *= gate * Sigmoid(gate);
          }
          p.out.data[at(p.out, t) + h * p.out.head + row] = Input(y);
          if (keeps && t < p.tokens) {
            StateArray<State> kept = p.kept;
            kept.data += t * p.kept_token;
            if constexpr (IsScaled<State>()) kept.scale += t * p.kept_scale_token;
            StoreRow(kept, kept_row, h, row, width, &s[0], options);
          }
          int64_t target = final_target;
          bool stores = p.update && has_state && t == tokens - 1;
          if (p.accepted.data != nullptr) {
            stores = p.update && has_state && t < targets.columns;
            if (stores) target = targets.At(n, t);
          }
          if (stores && target != p.pad && target >= 0 && target < p.slots) {
            StoreRow(p.state, target, h, row, width, &s[0], options);
          }
        }
      }
    }
  });
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
