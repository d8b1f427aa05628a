// SPDX-License-Identifier: Apache-2.0
// Gated activations on the CPU; formulas and parameters in activation.h. Every register's worth of columns is read,
// activated, multiplied and written before the next: bound by the exponential in the caches, by memory beyond them.
//   test  pytest tests/activation      bench  python benchmarks/bench_activation.py
#pragma once
#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer {
namespace cpu {

template <Activation ACT>
inline Vec Activate(const Vec& x) {
  using namespace activation;
  if constexpr (ACT == Activation::kSigmoid) {
    return 1.0f / (1.0f + Exp(-x));
  } else if constexpr (ACT == Activation::kSilu) {
    return x / (1.0f + Exp(-x));
  } else if constexpr (ACT == Activation::kGeluTanh) {
    return x / (1.0f + Exp(-x * (GELU_TANH_LINEAR + GELU_TANH_CUBIC * x * x)));
  } else {
    const Vec z = (x < 0.0f ? -x : x) * SQRT_HALF;
    const Vec t = 1.0f / (1.0f + ERFC_SLOPE * z);
    const Vec series = t * (ERFC_1 + t * (ERFC_2 + t * (ERFC_3 + t * (ERFC_4 + t * ERFC_5))));
    const Vec tail = 0.5f * series * Exp(-z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
}

}  // namespace cpu

template <Activation ACT, typename T>
Status ActAndMul(const ActAndMulParams<T>& p, Stream) {
  using namespace cpu;
  constexpr int64_t CHUNK = 4096;  // columns of one piece of work, so that a single long row is shared too
  const int64_t chunks = (p.columns + CHUNK - 1) / CHUNK;
  ParallelFor(p.rows * chunks, std::min(p.columns, CHUNK), [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / chunks, column = piece % chunks * CHUNK;
      const T* gate = p.gate + row * p.gate_stride + column;
      const T* up = p.up + row * p.up_stride + column;
      T* out = p.out + row * p.out_stride + column;
      ForEachVec(std::min(CHUNK, p.columns - column), [&](int64_t i, auto lanes) {
        Store(out + i, Activate<ACT>(Load(gate + i, lanes)) * Load(up + i, lanes), lanes);
      });
    }
  });
  return 0;
}

}  // namespace flashinfer
