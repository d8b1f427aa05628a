// SPDX-License-Identifier: Apache-2.0
// Activations in expert order, and back, on the CPU; parameters in moe/permute.h. Rows over threads.
//   test  pytest tests/fused_moe/test_moe_permute.py
#pragma once
#include <cstring>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "../../quantize_1x128_cpu.h"
#include "../permute.h"

namespace flashinfer {
namespace cpu {

/// Call body(row, input, output) for each row that has a token.
template <typename In, typename Out, typename Body>
inline void ForEachRow(const MoePermuteParams& p, const Body& body) {
  ParallelFor(p.rows, p.columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (p.row_to_pair[row] < 0) continue;
      const int64_t token = p.row_to_pair[row] / p.top_k;
      body(row, static_cast<const In*>(p.input) + token * p.input_stride,
           static_cast<Out*>(p.output) + row * p.output_stride);
    }
  });
}

}  // namespace cpu

template <typename T>
Status MoePermute(const MoePermuteParams& p, Stream) {
  cpu::ForEachRow<T, T>(p, [&](int64_t, const T* x, T* y) { std::memcpy(y, x, p.columns * sizeof(T)); });
  return 0;
}

template <typename T>
Status MoePermuteFp8(const MoePermuteParams& p, Stream) {
  const float factor = p.factor == nullptr ? 1.f : *p.factor;
  cpu::ForEachRow<T, cpu::float8_e4m3>(p, [&](int64_t, const T* x, cpu::float8_e4m3* y) {
    cpu::ForEachVec(p.columns,
                    [&](int64_t i, auto lanes) { cpu::Store(y + i, cpu::Load(x + i, lanes) * factor, lanes); });
  });
  return 0;
}

template <typename T>
Status MoePermuteFp8Block(const MoePermuteParams& p, Stream stream) {
  cpu::ForEachRow<T, uint8_t>(p, [&](int64_t row, const T* x, uint8_t* y) {
    const int blocks = int(p.columns / cpu::QUANTIZE_COLUMNS);
    const gemm::Quantize1x128Params one{x, 0, y, 0, p.scales + row, p.scale_stride, 1, blocks, false};
    gemm::Quantize1x128<T>(one, stream);
  });
  return 0;
}

template <typename In, typename Out>
Status MoeFinalize(const MoeFinalizeParams<In, Out>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.tokens, p.columns * p.top_k, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      ForEachVec(p.columns, [&](int64_t i, auto lanes) {
        Vec sum{};
        for (int64_t pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
          if (p.pair_to_row[pair] < 0) continue;
          const float scale = p.scales == nullptr ? 1.f : p.scales[pair];
          sum += Load(p.rows + p.pair_to_row[pair] * p.row_stride + i, lanes) * scale;
        }
        Store(p.output + token * p.output_stride + i, sum, lanes);
      });
    }
  });
  return 0;
}

}  // namespace flashinfer
