// SPDX-License-Identifier: Apache-2.0
// Gated norms on the CPU (formulas: gated_norm.h): a row stays in a scratch row of floats from the first sum of squares
// to the second.
//   test  pytest tests/norm/test_gated_norm.py      bench  python benchmarks/bench_norm.py -k gated
#pragma once
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "gated_norm.h"

namespace flashinfer {

inline Status GatedResidualNorm(const GatedResidualParams& p, Stream) {
  using namespace cpu;  // NOLINT(*)
  ParallelFor(p.rows, p.hidden, [&](int64_t begin, int64_t end) {
    const Scratch x(p.hidden);
    for (int64_t row = begin; row < end; ++row) {
      const auto* branch = p.branch + row * p.branch_stride;
      const float* residual = p.residual + row * p.residual_stride;
      RunningSum squares, next_squares;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec y = Load(branch + i, lanes);
        if (p.weight != nullptr) y *= Load(p.weight + i, lanes) + p.gain_center;
        Store(&x[i], y, lanes);
        squares.Add(y * y);
      });
      const float factor = 1.f / std::sqrt(squares.Total() / float(p.hidden) + p.eps);
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec alpha = p.alpha != nullptr ? Load(p.alpha + i, lanes) : Broadcast(p.alpha_scalar);
        const Vec y = alpha * Load(residual + i, lanes) + Load(p.beta + i, lanes) * (Load(&x[i], lanes) * factor);
        Store(&x[i], y, lanes);
        Store(p.out + row * p.out_stride + i, y, lanes);
        next_squares.Add(Keep(y * y, lanes));
      });
      if (p.next_weight == nullptr) continue;
      const float next_factor = 1.f / std::sqrt(next_squares.Total() / float(p.hidden) + p.next_eps);
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec y = Load(&x[i], lanes) * next_factor * (Load(p.next_weight + i, lanes) + p.next_gain_center);
        if (p.router != nullptr) Store(p.router + row * p.router_stride + i, y, lanes);
        Store(p.next + row * p.next_stride + i, y, lanes);
      });
    }
  });
  return 0;
}

inline Status SigmoidGateNorm(const SigmoidGateParams& p, Stream) {
  using namespace cpu;  // NOLINT(*)
  ParallelFor(p.rows * p.heads, 4 * p.dim, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const int64_t row = head / p.heads, column = head % p.heads * p.dim;
      auto* x = p.x + row * p.x_stride + column;
      const auto* gate = p.gate + row * p.gate_stride + column;
      RunningSum squares;
      ForEachVec(p.dim, [&](int64_t i, auto lanes) {
        const Vec y = Load(x + i, lanes);
        squares.Add(y * y);
      });
      const float factor = 1.f / std::sqrt(squares.Total() / float(p.dim) + p.eps);
      ForEachVec(p.dim, [&](int64_t i, auto lanes) {
        Store(x + i, Load(x + i, lanes) * factor / (1.f + Exp(-Load(gate + i, lanes))), lanes);
      });
    }
  });
  return 0;
}

}  // namespace flashinfer
