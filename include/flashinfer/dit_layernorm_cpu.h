// SPDX-License-Identifier: Apache-2.0
// LayerNorm of diffusion transformers on the CPU; formula and parameters in dit_layernorm.h.
// Like norm_cpu.h: one trip from memory to a float scratch row, one from there to the output.
//   test  pytest tests/norm/test_dit_layernorm.py      bench  python benchmarks/bench_norm.py
#pragma once
#include <cmath>
#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "dit_layernorm.h"

namespace flashinfer {
namespace cpu {

/// Load at i, or return `missing` in each lane if the array is null.
template <typename T, typename Lanes>
inline Vec LoadOr(const T* from, int64_t i, Lanes lanes, float missing) {
  return from == nullptr ? Broadcast(missing) : Load(from + i, lanes);
}

/// Return the row of `from`, or null if the array is null.
template <typename T>
inline T* RowOf(T* from, int64_t offset) {
  return from == nullptr ? nullptr : from + offset;
}

}  // namespace cpu

inline Status DitLayerNorm(const DitLayerNormParams& p, Stream) {
  using namespace cpu;
  const float input_scale = p.input_scale == nullptr ? 1.0f : *p.input_scale;

  ParallelFor(p.num_rows, p.hidden, [&](int64_t begin, int64_t end) {
    const Scratch row(p.hidden);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t dense = r * p.hidden, modulation = r * p.modulation_stride;
      const bfloat16* input = p.input + dense;
      const bfloat16* residual = RowOf(p.residual, dense);
      const bfloat16* gate = RowOf(p.gate, modulation);
      const bfloat16* scale = RowOf(p.scale, modulation);
      const bfloat16* shift = RowOf(p.shift, modulation);

      RunningSum sum, squares;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec x = Load(input + i, lanes) * input_scale;
        if (gate != nullptr) x *= Load(gate + i, lanes) + LoadOr(p.gate_bias, i, lanes, 0.0f);
        x += LoadOr(residual, i, lanes, 0.0f);
        Store(p.residual_out + dense + i, x, lanes);
        Store(&row[i], x);
        sum.Add(x);
        squares.Add(x * x);
      });
      const float mean = sum.Total() / p.hidden;
      const float variance = squares.Total() / p.hidden - mean * mean;
      // max(0, NaN) must stay NaN: a NaN compares false, so the comparison picks the variance.
      const float rstd = 1.0f / std::sqrt((variance < 0.0f ? 0.0f : variance) + p.eps);

      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec n = (Load(&row[i]) - mean) * rstd;
        const Vec factor = p.gamma != nullptr
                               ? Load(p.gamma + i, lanes)
                               : LoadOr(scale, i, lanes, 0.0f) + LoadOr(p.scale_bias, i, lanes, 0.0f) + 1.0f;
        const Vec offset = p.gamma != nullptr ? LoadOr(p.beta, i, lanes, 0.0f)
                                              : LoadOr(shift, i, lanes, 0.0f) + LoadOr(p.shift_bias, i, lanes, 0.0f);
        Store(p.norm_out + dense + i, n * factor + offset, lanes);
      });
    }
  });
  return 0;
}

}  // namespace flashinfer
