// SPDX-License-Identifier: Apache-2.0
// Convolution and gated norm of a KDA layer (kda_layer.h) on the CPU.
//   test  pytest tests/recurrent/test_kda.py
#pragma once
#include "../../cpu/parallel.h"
#include "../kda_layer.h"
#include "step.h"

namespace flashinfer {
namespace recurrent {

inline Status Convolve(const ConvolutionParams& p, Stream) {
  using cpu::bfloat16;
  const int64_t width = p.channels / 3;
  const auto sequence = [&](int64_t n) {
    const bool is_packed = p.starts.data != nullptr;
    const int64_t begin = is_packed ? p.starts.At(n) : n, end = is_packed ? p.starts.At(n + 1) : n + 1;
    const int64_t slot = p.slots.At(n);
    auto* out = static_cast<bfloat16*>(p.out);
    if (slot < 1 || begin >= end) {
      for (int64_t i = begin * p.channels; i < end * p.channels; ++i) out[i] = bfloat16(0.f);
      return;
    }
    int64_t first = p.accepted.data != nullptr ? p.accepted.At(n) - 1 : 0;
    first = std::max<int64_t>(0, std::min(first, p.window - 3));
    for (int64_t c = 0; c < p.channels; ++c) {
      const float* weight = p.weight + c / width * 4 * width + c % width;
      auto* state = static_cast<bfloat16*>(p.state) + slot * p.slot_stride + c * p.channel_stride;
      bfloat16 x[4];
      for (int j = 0; j < 3; ++j) x[j] = state[(first + j) * p.time_stride];
      state[0] = x[1];
      state[p.time_stride] = x[2];
      for (int64_t t = begin; t < end; ++t) {
        x[3] = static_cast<const bfloat16*>(p.x)[t * p.x_stride + c];
        float y = 0.f;
        for (int j = 0; j < 4; ++j) y += weight[j * width] * float(x[j]);
        out[t * p.channels + c] = bfloat16(y * Sigmoid(y));
        if (2 + t - begin < p.window) state[(2 + t - begin) * p.time_stride] = x[3];
        for (int j = 0; j < 3; ++j) x[j] = x[j + 1];
      }
    }
  };
  cpu::ParallelFor(p.sequences, 16 * p.channels, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) sequence(n);
  });
  return 0;
}

inline Status GatedHeadNorm(const HeadNormParams& p, Stream) {
  using namespace cpu;  // NOLINT(*)
  cpu::ParallelFor(p.rows, 4 * p.dim, [&](int64_t begin, int64_t end) {
    const Scratch weight(p.dim);
    for (int64_t i = 0; i < p.dim; ++i) weight[i] = cpu_step::LoadNumber(p.weight, i, p.weight_type);
    for (int64_t row = begin; row < end; ++row) {
      const float* x = p.x + row * p.dim;
      const auto* gate = static_cast<const bfloat16*>(p.gate) + row * p.dim;
      auto* out = static_cast<bfloat16*>(p.out) + row * p.dim;
      const float factor = 1.f / std::sqrt(cpu_step::Dot(x, x, p.dim) / float(p.dim) + p.eps);
      ForEachVec(p.dim, [&](int64_t i, auto lanes) {
        const Vec g = 1.f / (1.f + cpu::Exp(-Load(gate + i, lanes)));
        Store(out + i, Load(x + i, lanes) * factor * Load(&weight[i], lanes) * g, lanes);
      });
    }
  });
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
