// SPDX-License-Identifier: Apache-2.0
// Stages around a step of Kimi delta attention: the short causal convolution of q, k, v and the gated norm of the
// result. Defined in kda_layer.cuh (CUDA), cpu/kda_layer.h (CPU).
//   convolution   y[t, c] = silu(sum over j < 4 of weight[c / C][j][c % C] * x[t - 3 + j, c])      C = channels / 3
//   norm          y = x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate), over each head
//   test  pytest tests/recurrent/test_kda.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../backend.h"
#include "step.h"

namespace flashinfer {
namespace recurrent {

/// The inputs before the first token are in `state` [slot, channel, window]: three of them from index max(accepted, 1) - 1
/// on. Afterwards it holds the last two of these, then the tokens of the call. Slots below 1 are skipped.
struct ConvolutionParams {
  const void* x;  ///< bf16 [tokens, channels]
  void* out;      ///< bf16, contiguous
  const float* weight;
  void* state;  ///< bf16
  int64_t tokens, channels, sequences, window, x_stride, slot_stride, channel_stride, time_stride;
  Indices starts, accepted, slots;  ///< starts without data: one token of each sequence
};

Status Convolve(const ConvolutionParams& params, Stream stream);

struct HeadNormParams {
  const float* x;
  const void* gate;  ///< bf16
  void* out;         ///< bf16
  const void* weight;
  ElementType weight_type;
  int64_t rows, dim;
  float eps;
};

Status GatedHeadNorm(const HeadNormParams& params, Stream stream);

}  // namespace recurrent
}  // namespace flashinfer
