// SPDX-License-Identifier: Apache-2.0
// Norms with gains and gates of a hybrid model, fp32 inside; rms(x) = x * rsqrt(mean(x^2) + eps).
//   residual  out  = alpha * residual + beta * rms(branch * (weight + gain_center))      the gain before the norm
//   next      next = rms(out, next_eps) * (next_weight + next_gain_center)               from the unrounded sum
//   gate      x   <- rms(x) * sigmoid(gate), each head of 64 on its own, in place
// Defined in gated_norm.cuh (CUDA), gated_norm_cpu.h (CPU).
//   test  pytest tests/norm/test_gated_norm.py      bench  python benchmarks/bench_norm.py -k gated
#pragma once
#include "backend.h"

namespace flashinfer {

struct GatedResidualParams {
  const bfloat16_t* branch;
  const float* residual;
  const bfloat16_t* weight;  ///< null: no gain
  const float* alpha;        ///< null: alpha_scalar
  const float* beta;
  float* out;                     ///< may be `residual`
  const bfloat16_t* next_weight;  ///< null: no second norm
  bfloat16_t* next;
  float* router;  ///< null, or the second norm before it is rounded
  int64_t rows, hidden, branch_stride, residual_stride, out_stride, next_stride, router_stride;
  float alpha_scalar, eps, gain_center, next_eps, next_gain_center;
  bool enable_pdl;
};

Status GatedResidualNorm(const GatedResidualParams& params, Stream stream);

struct SigmoidGateParams {
  bfloat16_t* x;
  const bfloat16_t* gate;
  int64_t rows, heads, dim, x_stride, gate_stride;
  float eps;
  bool enable_pdl;
};

Status SigmoidGateNorm(const SigmoidGateParams& params, Stream stream);

}  // namespace flashinfer
