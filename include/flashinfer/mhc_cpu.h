// SPDX-License-Identifier: Apache-2.0
// Manifold hyper-connections on the CPU; formulas and parameters in mhc.h. Tokens over threads, a register of columns at
// a time through all four streams: bound by memory.
//   test  pytest tests/mhc      bench  python benchmarks/bench_mhc.py
#pragma once
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "mhc.h"

namespace flashinfer {

inline Status MhcPost(const MhcPostParams& p, Stream) {
  using namespace cpu;
  const int64_t row = MHC_STREAMS * p.hidden;
  ParallelFor(p.tokens, row, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *post = p.post + t * MHC_STREAMS, *comb = p.comb + t * MHC_STREAMS * MHC_STREAMS;
      const bfloat16 *x = p.x + t * p.hidden, *residual = p.residual + t * row;
      bfloat16* out = p.out + t * row;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec branch = Load(x + i, lanes);
        Vec stream[MHC_STREAMS];
        for (int j = 0; j < MHC_STREAMS; ++j) stream[j] = Load(residual + j * p.hidden + i, lanes);
        for (int j = 0; j < MHC_STREAMS; ++j) {
          Vec y = branch * post[j];
          for (int k = 0; k < MHC_STREAMS; ++k) y += stream[k] * comb[k * MHC_STREAMS + j];
          Store(out + j * p.hidden + i, y, lanes);
        }
      });
    }
  });
  return 0;
}

inline Status MhcPre(const MhcPreParams& p, Stream) {
  using namespace cpu;
  const int64_t row = MHC_STREAMS * p.hidden;
  const auto exp = [](float x) { return std::exp(x); };
  const auto reciprocal = [](float x) { return 1.f / x; };
  const auto rsqrt = [](float x) { return 1.f / std::sqrt(x); };
  ParallelFor(p.tokens, row, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const bfloat16* residual = p.residual + t * row;
      float squares = 0.f;
      if (p.sqrsum != nullptr) {
        squares = mhc::SquareSum(p, t);
      } else {
        RunningSum sum;
        ForEachVec(row, [&](int64_t i, auto lanes) {
          const Vec x = Load(residual + i, lanes);
          sum.Add(x * x);
        });
        squares = sum.Total();
      }
      const float mean = squares / p.k, r = rsqrt(mean + p.rms_eps);
      mhc::PostAndComb(p, t, mean, exp, reciprocal, rsqrt);
      float pre[MHC_STREAMS], m[MHC_STREAMS];
      mhc::LoadMix<MHC_PRE>(p, t, m);
      for (int j = 0; j < MHC_STREAMS; ++j) {
        pre[j] = reciprocal(1.f + exp(-(m[j] * r * p.scale[0] + p.base[MHC_PRE + j]))) + p.pre_eps;
      }
      bfloat16* out = p.layer_input + t * p.hidden;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec y = Load(residual + i, lanes) * pre[0];
        for (int j = 1; j < MHC_STREAMS; ++j) y += Load(residual + j * p.hidden + i, lanes) * pre[j];
        Store(out + i, y, lanes);
      });
    }
  });
  return 0;
}

}  // namespace flashinfer
