// SPDX-License-Identifier: Apache-2.0
// The fused LayerNorm of diffusion transformers on CUDA (formula and parameters: dit_layernorm.h).
// A block per row, NVEC 16-byte vectors per thread; r stays in registers as fp32. Bound by DRAM: up to five reads and
// two writes of the row. Every term that may be absent is a uniform branch on a null pointer.
//   test  pytest tests/norm/test_dit_layernorm.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "dit_layernorm.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

template <int NVEC>
__global__ void DitLayerNormKernel(const __grid_constant__ DitLayerNormParams p) {
  constexpr int VEC = 8;
  using V = Vec<__nv_bfloat16, VEC>;
  __shared__ float scratch[2][32];
  const int64_t row = blockIdx.x;
  const int64_t base = row * p.hidden, modulation = row * p.modulation_stride;
  const float input_scale = p.input_scale != nullptr ? *p.input_scale : 1.f;
  auto column_of = [&](int v) { return (int(threadIdx.x) + v * int(blockDim.x)) * VEC; };
  auto load = [&](const __nv_bfloat16* p, int64_t offset) { return p != nullptr ? V::Load(p + offset) : V::Zero(); };

  V x[NVEC], add[NVEC], gate[NVEC], scale[NVEC], shift[NVEC];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int c = column_of(v);
    const bool inside = c < p.hidden;
    x[v] = inside ? V::Load(p.input + base + c) : V::Zero();
    add[v] = inside ? load(p.residual, base + c) : V::Zero();
    gate[v] = inside ? load(p.gate, modulation + c) : V::Zero();
    scale[v] = inside ? load(p.scale, modulation + c) : V::Zero();
    shift[v] = inside ? load(p.shift, modulation + c) : V::Zero();
  }

  float r[NVEC][VEC], sum = 0.f, square = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int c = column_of(v);
    if (c >= p.hidden) continue;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float bias = p.gate_bias != nullptr ? p.gate_bias[c + i] : 0.f;
      const float g = p.gate != nullptr ? ToFloat(gate[v][i]) + bias : 1.f;
      r[v][i] = ToFloat(add[v][i]) + ToFloat(x[v][i]) * g * input_scale;
      sum += r[v][i];
      square += r[v][i] * r[v][i];
    }
    RoundTo<__nv_bfloat16, VEC>(r[v]).Store(p.residual_out + base + c);
  }
  const float mean = BlockSum(sum, scratch[0]) / float(p.hidden);
  const float var = fmaxf(0.f, BlockSum(square, scratch[1]) / float(p.hidden) - mean * mean);
  const float rstd = rsqrtf(var + p.eps);

#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int c = column_of(v);
    if (c >= p.hidden) continue;
    float y[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float n = (r[v][i] - mean) * rstd;
      if (p.gamma != nullptr) {
        y[i] = n * p.gamma[c + i] + p.beta[c + i];
      } else {
        const float scale_bias = p.scale_bias != nullptr ? p.scale_bias[c + i] : 0.f;
        const float shift_bias = p.shift_bias != nullptr ? p.shift_bias[c + i] : 0.f;
        y[i] = n * (1.f + ToFloat(scale[v][i]) + scale_bias) + (ToFloat(shift[v][i]) + shift_bias);
      }
    }
    RoundTo<__nv_bfloat16, VEC>(y).Store(p.norm_out + base + c);
  }
}

}  // namespace norm

/// `hidden` must be a multiple of 8 and at most 24576; rows 16-byte aligned.
FLASHINFER_INLINE Status DitLayerNorm(const DitLayerNormParams& p, Stream stream) {
  constexpr int NVEC = 3;
  if (p.num_rows == 0) return cudaSuccess;
  if (p.hidden % 8 != 0 || p.hidden > 1024 * NVEC * 8 || p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  const int threads = int(CeilDiv(p.hidden, 8 * NVEC * 32) * 32);
  return Launch(norm::DitLayerNormKernel<NVEC>, dim3(p.num_rows), dim3(threads), false, stream, p);
}

}  // namespace flashinfer
