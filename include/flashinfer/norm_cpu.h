// SPDX-License-Identifier: Apache-2.0
// RMSNorm and LayerNorm on the CPU; formulas and parameters in norm.h.
// A row goes once from memory into a float scratch row (16 KiB for hidden = 4096: it stays in L1 or L2), with the
// statistics taken on the way, and from there once to the output. So the kernels are bound by memory, `out` may alias
// `input`, and the sum of input and residual is never rounded before it is normalised.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include <cmath>
#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "norm.h"

namespace flashinfer {
namespace cpu {

inline int64_t RowOffset(int64_t row, int64_t heads, const RowStride& stride) {
  return (row / heads) * stride.batch + (row % heads) * stride.head;
}

/// Return the factor of the result: 1 / *scale for the fp8 kinds.
inline float OutputFactor(NormOut kind, const float* scale) {
  return kind == NormOut::kSame || scale == nullptr ? 1.0f : 1.0f / *scale;
}

inline Vec Silu(const Vec& y) { return y / (1.0f + Exp(-y)); }

template <typename T, typename DTypeOut>
inline void RMSNormRows(const RMSNormParams<T>& p) {
  const Scratch weight(p.hidden);
  ForEachVec(p.hidden, [&](int64_t i, auto lanes) { Store(&weight[i], Load(p.weight + i, lanes) + p.weight_bias); });
  const float factor = OutputFactor(p.out_kind, p.scale);

  ParallelFor(p.num_rows, p.hidden, [&](int64_t begin, int64_t end) {
    const Scratch row(p.hidden);
    for (int64_t r = begin; r < end; ++r) {
      const T* input = p.input + RowOffset(r, p.heads, p.input_stride);
      DTypeOut* out = static_cast<DTypeOut*>(p.out) + RowOffset(r, p.heads, p.out_stride);
      T* residual = p.residual == nullptr ? nullptr : p.residual + RowOffset(r, p.heads, p.residual_stride);

      RunningSum squares;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec x = Load(input + i, lanes);
        if (residual != nullptr) {
          x += Load(residual + i, lanes);
          Store(residual + i, x, lanes);
        }
        Store(&row[i], x);
        squares.Add(x * x);
      });
      const float rstd = 1.0f / std::sqrt(squares.Total() / p.hidden + p.eps);

      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec y = Load(&row[i]) * rstd * Load(&weight[i]);
        if (p.silu) y = Silu(y);
        if constexpr (sizeof(DTypeOut) == 1) y *= factor;
        Store(out + i, y, lanes);
      });
    }
  });
}

template <typename DTypeOut>
inline void LayerNormRows(const LayerNormParams& p) {
  const float factor = OutputFactor(p.out_kind, p.scale);

  ParallelFor(p.num_rows, p.hidden, [&](int64_t begin, int64_t end) {
    const Scratch row(p.hidden);
    for (int64_t r = begin; r < end; ++r) {
      const bfloat16* input = p.input + r * p.input_stride;
      DTypeOut* out = static_cast<DTypeOut*>(p.out) + r * p.out_stride;

      RunningSum sum, squares;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec x = Load(input + i, lanes);
        Store(&row[i], x);
        sum.Add(x);
      });
      const float mean = sum.Total() / p.hidden;
      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        const Vec d = Keep(Load(&row[i]) - mean, lanes);
        squares.Add(d * d);
      });
      const float rstd = 1.0f / std::sqrt(squares.Total() / p.hidden + p.eps);

      ForEachVec(p.hidden, [&](int64_t i, auto lanes) {
        Vec y = (Load(&row[i]) - mean) * rstd * Load(p.gamma + i, lanes) + Load(p.beta + i, lanes);
        if constexpr (sizeof(DTypeOut) == 1) y = Round<bfloat16>(y) * factor;  // fp8 of the bfloat16 result
        Store(out + i, y, lanes);
      });
    }
  });
}

}  // namespace cpu

template <typename T>
Status RMSNorm(const RMSNormParams<T>& params, Stream) {
  switch (params.out_kind) {
    case NormOut::kSame:
      cpu::RMSNormRows<T, T>(params);
      break;
    case NormOut::kE4M3:
      cpu::RMSNormRows<T, float8_e4m3_t>(params);
      break;
    case NormOut::kE5M2:
      cpu::RMSNormRows<T, float8_e5m2_t>(params);
      break;
  }
  return 0;
}

inline Status LayerNorm(const LayerNormParams& params, Stream) {
  switch (params.out_kind) {
    case NormOut::kSame:
      cpu::LayerNormRows<bfloat16_t>(params);
      break;
    case NormOut::kE4M3:
      cpu::LayerNormRows<float8_e4m3_t>(params);
      break;
    case NormOut::kE5M2:
      cpu::LayerNormRows<float8_e5m2_t>(params);
      break;
  }
  return 0;
}

}  // namespace flashinfer
