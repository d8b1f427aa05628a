// SPDX-License-Identifier: Apache-2.0
// Residual sum, RMSNorm and quantisation by blocks on the CPU (formulas: norm_block_quant.h): a row stays in a scratch
// row of floats until its norm is written; its blocks are quantised from there while they are in the cache.
//   test  pytest tests/norm/test_norm_block_quant.py      bench  python benchmarks/bench_norm.py -k block_quant
#pragma once
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "norm_block_quant.h"
#include "quantize_1x128_cpu.h"

namespace flashinfer {

template <typename T>
Status NormBlockQuant(const NormBlockQuantParams<T>& p, Stream) {
  using namespace cpu;  // NOLINT(*)
  static_assert(NORM_BLOCK == QUANTIZE_COLUMNS);
  ParallelFor(p.rows, 2 * p.hidden, [&](int64_t begin, int64_t end) {
    const Scratch sum(p.hidden);
    for (int64_t row = begin; row < end; ++row) {
      const T* input = p.input + row * p.input_stride;
      T* residual = p.residual + row * p.residual_stride;
      T* normed = p.normed + row * p.normed_stride;
      auto* out = reinterpret_cast<float8_e4m3*>(p.out + row * p.out_stride);
      RunningSum squares;
      for (int64_t i = 0; i < p.hidden; i += LANES) {
        const Vec x = Load(input + i) + Load(residual + i);
        Store(residual + i, x);
        Store(&sum[i], x);
        squares.Add(x * x);
      }
      const float factor = 1.f / std::sqrt(squares.Total() / float(p.hidden) + p.eps);
      for (int64_t i = 0; i < p.hidden; i += LANES) {
        Store(normed + i, Load(&sum[i]) * factor * Load(p.weight + i));
      }
      for (int64_t block = 0; block < p.hidden / NORM_BLOCK; ++block) {
        const int64_t first = block * NORM_BLOCK;
        const float amax = BlockAmax(normed + first), q = amax == 0.f ? 1.f : 448.f / amax;
        for (int64_t i = first; i < first + NORM_BLOCK; i += LANES) Store(out + i, Load(normed + i) * q);
        p.scales[block * p.scale_stride + row] = 1.f / q;
      }
    }
  });
  return 0;
}

}  // namespace flashinfer
