// SPDX-License-Identifier: Apache-2.0
// Mamba-2 over whole sequences on the CPU, token by token; parameters in ../ssd.h. A thread has 16 rows of one head of one
// sequence: their state (8 KiB) stays in L1 from the first token to the last.
//   test  pytest tests/recurrent -k ssd
#pragma once
#include <algorithm>
#include <vector>

#include "../ssd.h"
#include "state_row.h"

namespace flashinfer {
namespace recurrent {

inline float SsdLoad(const SsdStates& s, int64_t at) { return cpu_step::WeightAt({s.data, s.type, 0, 0, 0, 0}, at); }

inline void SsdStore(const SsdStates& s, int64_t at, float x) {
  switch (s.type) {
    case WeightType::kFloat:
      static_cast<float*>(s.data)[at] = x;
      break;
    case WeightType::kBfloat16:
      static_cast<cpu::bfloat16*>(s.data)[at] = cpu::bfloat16(x);
      break;
    default:
      static_cast<cpu::float16*>(s.data)[at] = cpu::float16(x);
  }
}

template <typename Input>
Status Ssd(const SsdParams<Input>& p, Stream) {
  using namespace cpu_step;
  constexpr int64_t ROWS = 16;
  const int64_t blocks = (p.dim + ROWS - 1) / ROWS, width = p.dstate;
  const int64_t work = ROWS * width * std::max<int64_t>(1, p.tokens);
  cpu::ParallelFor(p.sequences * p.heads * blocks, work, [&](int64_t first, int64_t last) {
    const cpu::Scratch state(ROWS * width), b(width), c(width);
    for (int64_t item = first; item < last; ++item) {
      const int64_t h = item / blocks % p.heads, n = item / blocks / p.heads, group = h / p.heads_per_group;
      const int64_t row0 = item % blocks * ROWS, rows = std::min<int64_t>(ROWS, p.dim - row0);
      const SsdSequence s = FindSsdSequence(p, n);
      const auto store = [&](const SsdStates& to, int64_t row) {
        for (int64_t i = 0; i < rows * width; ++i)
          SsdStore(to, row * to.row + (h * p.dim + row0) * width + i, state[i]);
      };
      for (int64_t i = 0; i < rows * width; ++i) {
        state[i] =
            p.initial.data == nullptr ? 0.f : SsdLoad(p.initial, n * p.initial.row + (h * p.dim + row0) * width + i);
      }
      const float bias = p.dt_bias.data == nullptr ? 0.f : WeightAt(p.dt_bias, h * p.dt_bias.head);
      for (int64_t t = s.begin; t < s.end; ++t) {
        const auto at = [&](const auto& a) { return s.batch * a.batch + t * a.token; };
        float dt = WeightAt(p.dt, at(p.dt) + h * p.dt.head) + bias;
        if (p.softplus) dt = Softplus(dt);
        dt = std::min(std::max(dt, p.dt_min), p.dt_max);
        const float decay = std::exp(Mamba2Rule::LogDecay(dt, p.a[h]));
        LoadRow(p.b.data + at(p.b) + group * p.b.head, 1.f, width, &b[0]);
        LoadRow(p.c.data + at(p.c) + group * p.c.head, 1.f, width, &c[0]);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t row = row0 + r;
          const float x = float(p.x.data[at(p.x) + h * p.x.head + row]);
          float y = StepAndDot(&state[r * width], decay, Mamba2Rule::Correction(x, 0.f, dt), &b[0], &c[0], width);
          if (p.d.data != nullptr) y += WeightAt(p.d, h * p.d.head + row * p.d.row) * x;
          if (p.z.data != nullptr) {
            const float gate = float(p.z.data[at(p.z) + h * p.z.head + row]);
            y *= gate * Sigmoid(gate);
          }
          p.out.data[at(p.out) + h * p.out.head + row * p.out_row] = Input(y);
        }
        if (s.keep == t + 1) store(p.kept, s.keep_slot);
      }
      if (p.final.data != nullptr) store(p.final, n);
    }
  });
  return 0;
}

inline Status SsdBounds(const IndexArray& seq_idx, int32_t* bounds, int tokens, int sequences, Stream) {
  std::fill_n(bounds, 2 * sequences, 0);
  for (int t = 0; t < tokens; ++t) {
    const int64_t n = seq_idx.At(0, t);
    if (n < 0 || n >= sequences) return 1;
    if (t == 0 || seq_idx.At(0, t - 1) != n) bounds[2 * n] = t;
    bounds[2 * n + 1] = t + 1;
  }
  return 0;
}

inline Status SeqChunkCumsum(const IndexArray& seq_idx, const IndexArray& chunk_indices,
                             const IndexArray& chunk_offsets, int32_t* output, int chunk, int chunks, int tokens,
                             int sequences, Stream) {
  std::fill_n(output, sequences + 1, 0);
  for (int i = 0; i < chunks; ++i) {
    const int64_t token = chunk_indices.At(i) * chunk + chunk_offsets.At(i);
    if (token < 0 || token >= tokens) return 1;
    const int64_t n = seq_idx.At(0, token);
    if (n < 0 || n >= sequences) return 1;
    ++output[n + 1];
  }
  for (int n = 0; n < sequences; ++n) output[n + 1] += output[n];
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
