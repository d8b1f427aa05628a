// SPDX-License-Identifier: Apache-2.0
// LayerNorm of diffusion transformers, fused with the gated residual before it and the modulation after it.
//   g  = gate ? gate + gate_bias : 1                  u = input * g * input_scale
//   r  = residual ? residual + u : u                  residual_out = bfloat16(r)
//   n  = (r - mean) * rsqrt(max(0, E[r^2] - mean^2) + eps)
//   y  = gamma ? n * gamma + beta : n * (1 + scale + scale_bias) + (shift + shift_bias)
// A null pointer leaves its term out (bias 0, input_scale 1).
//   test  pytest tests/norm/test_dit_layernorm.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "backend.h"

namespace flashinfer {

struct DitLayerNormParams {
  const bfloat16_t* input;     ///< (num_rows, hidden), contiguous
  const bfloat16_t* residual;  ///< contiguous, or null
  const bfloat16_t* gate;      ///< rows modulation_stride apart, or null
  const bfloat16_t* scale;
  const bfloat16_t* shift;
  const float* gate_bias;  ///< (hidden,), each may be null
  const float* scale_bias;
  const float* shift_bias;
  const float* gamma;
  const float* beta;
  const float* input_scale;  ///< one element, or null
  bfloat16_t* residual_out;
  bfloat16_t* norm_out;
  int64_t num_rows;
  int64_t hidden;
  int64_t modulation_stride;
  float eps;
};

Status DitLayerNorm(const DitLayerNormParams& params, Stream stream);

}  // namespace flashinfer
