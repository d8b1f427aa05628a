// SPDX-License-Identifier: Apache-2.0
// The fused LayerNorm of diffusion transformers on CUDA (formula and parameters: dit_layernorm.h).
// A block per row, NVEC vectors per thread (16 bytes, or one element where something is not aligned); r stays in
// registers as fp32. Bound by DRAM: up to five reads and two writes of the row. Every term that may be absent is a
// uniform branch on a null pointer.
//   test  pytest tests/norm/test_dit_layernorm.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "dit_layernorm.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

template <int VEC, int NVEC>
__global__ void __launch_bounds__(256) DitLayerNormKernel(const __grid_constant__ DitLayerNormParams p) {
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

  // A row of floats that may be absent.
  auto floats = [&](const float* p, int c, float (&y)[VEC]) {
    if (p != nullptr) {
      LoadFloats(p + c, y);
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) y[i] = 0.f;
    }
  };

  float r[NVEC][VEC], sum = 0.f, square = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int c = column_of(v);
    if (c >= p.hidden) continue;
    float bias[VEC];
    floats(p.gate_bias, c, bias);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float g = p.gate != nullptr ? ToFloat(gate[v][i]) + bias[i] : 1.f;
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
    float y[VEC], gain[VEC], offset[VEC];
    floats(p.gamma != nullptr ? p.gamma : p.scale_bias, c, gain);
    floats(p.gamma != nullptr ? p.beta : p.shift_bias, c, offset);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      if (p.gamma == nullptr) {
        gain[i] += 1.f + ToFloat(scale[v][i]);
        offset[i] += ToFloat(shift[v][i]);
      }
      y[i] = (r[v][i] - mean) * rstd * gain[i] + offset[i];
    }
    RoundTo<__nv_bfloat16, VEC>(y).Store(p.norm_out + base + c);
  }
}

}  // namespace norm

/// Run the kernel. `hidden` may be at most 6144.
FLASHINFER_INLINE Status DitLayerNorm(const DitLayerNormParams& p, Stream stream) {
  constexpr int ELEMENTS = 24;  // elements per thread
  if (p.num_rows == 0) return cudaSuccess;
  if (p.hidden > 256 * ELEMENTS || p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  bool aligned = p.hidden % 8 == 0 && p.modulation_stride % 8 == 0;
  for (const void* pointer :
       {(const void*)p.input, (const void*)p.residual, (const void*)p.gate, (const void*)p.scale, (const void*)p.shift,
        (const void*)p.gate_bias, (const void*)p.scale_bias, (const void*)p.shift_bias, (const void*)p.gamma,
        (const void*)p.beta, (const void*)p.residual_out, (const void*)p.norm_out}) {
    aligned = aligned && IsAligned(pointer, 16);
  }
  auto kernel = aligned ? norm::DitLayerNormKernel<8, ELEMENTS / 8> : norm::DitLayerNormKernel<1, ELEMENTS>;
  return Launch(kernel, dim3(p.num_rows), dim3(BlockThreads(p.hidden, ELEMENTS)), false, stream, p);
}

}  // namespace flashinfer
