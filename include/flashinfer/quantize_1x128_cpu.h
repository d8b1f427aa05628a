// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations by 1 x 128 blocks on the CPU; parameters in quantize_1x128.h.
//   test  pytest tests/gemm/test_quantize_1x128.py
#pragma once
#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "quantize_1x128.h"

namespace flashinfer {
namespace cpu {

constexpr int QUANTIZE_COLUMNS = 128;  // columns of a row that share a scale

/// Return the largest magnitude of a block. NaN is ignored.
template <typename T>
inline float BlockAmax(const T* x) {
  Vec most{};
  for (int i = 0; i < QUANTIZE_COLUMNS; i += LANES) {
    const Vec magnitude = BitCast<Vec>(BitCast<UintVec>(Load(x + i)) & 0x7FFFFFFFu);
    most = magnitude > most ? magnitude : most;
  }
  float lanes[LANES], amax = 0.f;
  Store(lanes, most);
  for (const float lane : lanes) amax = lane > amax ? lane : amax;
  return amax;
}

}  // namespace cpu

namespace gemm {

template <typename T>
Status Quantize1x128(const Quantize1x128Params& p, Stream) {
  const int64_t columns = int64_t(p.blocks) * cpu::QUANTIZE_COLUMNS;
  cpu::ParallelFor(p.rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* const input = static_cast<const T*>(p.input) + row * p.input_stride;
      auto* const codes = reinterpret_cast<cpu::float8_e4m3*>(p.codes + row * p.code_stride);
      for (int block = 0; block < p.blocks; ++block) {
        const int64_t first = int64_t(block) * cpu::QUANTIZE_COLUMNS;
        const float amax = cpu::BlockAmax(input + first);
        const float q = amax == 0.f ? 1.f : 448.f / amax;
        for (int64_t i = first; i < first + cpu::QUANTIZE_COLUMNS; i += cpu::LANES) {
          cpu::Store(codes + i, cpu::Load(input + i) * q);
        }
        p.scales[block * p.scale_stride + row] = 1.f / q;
      }
    }
  });
  return 0;
}

}  // namespace gemm
}  // namespace flashinfer
