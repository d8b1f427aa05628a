// SPDX-License-Identifier: Apache-2.0
// QK RMSNorm with 3-D rotary embedding on CUDA (formulas and parameters: qk_rmsnorm_rope.h).
// A block per token. Cosines and sines of the token's D / 2 angles are computed once into shared memory and serve every
// head. A work item is two 16-byte vectors half a head apart, so that a pair never leaves its thread in either layout.
// The row is read for the statistics and again for the result: at most 48 KB, it comes from L1 or L2 the second time.
//   test  pytest tests/norm/test_qk_rmsnorm_rope.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "qk_rmsnorm_rope.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

constexpr int QK_THREADS = 256;

/// Return the angle of pair i for the token at (frame, height, width).
__device__ __forceinline__ float PairAngle(const QkRMSNormRopeParams& p, int i, int frame, int height, int width) {
  const int channel = 2 * i;
  int position = frame, begin = 0, channels = p.num_frame_channels;
  if (channel >= p.num_frame_channels) {
    position = height, begin = p.num_frame_channels, channels = p.num_height_channels;
    if (channel >= begin + channels) {
      position = width, begin += channels, channels = p.num_width_channels;
    }
  }
  const float j = float((channel - begin) / 2);
  float freq = exp2f(-2.f * j / float(channels) * p.log2_base);
  if (p.factor != 1.f) {
    const float high = fabsf(p.high - p.low) <= 1e-6f ? p.high + 0.001f : p.high;
    const float ramp = fminf(fmaxf((j - p.low) / (high - p.low), 0.f), 1.f);
    freq = freq * (1.f - ramp) + freq / p.factor * ramp;
  }
  return float(position) * freq;
}

/// Normalise and rotate the heads of q or k.
template <bool FP8>
__device__ __forceinline__ void RotateHeads(const QkRMSNormRopeParams& p, const __nv_bfloat16* in,
                                            const __nv_bfloat16* weight, void* out, int64_t out_offset, int heads,
                                            float* scratch, const float2* turn) {
  constexpr int VEC = 8;
  using V = Vec<__nv_bfloat16, VEC>;
  const int d = p.head_dim, half = d / 2, width = heads * d, per_head = half / VEC;

  float rstd = 1.f;
  if (p.is_qk_norm) {
    float sum = 0.f;
    for (int c = threadIdx.x * VEC; c < width; c += blockDim.x * VEC) {
      const V x = V::Load(in + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum += ToFloat(x[i]) * ToFloat(x[i]);
    }
    rstd = rsqrtf(BlockSum(sum, scratch) / float(width) + p.eps);
  }
  auto load = [&](int column, float (&y)[VEC]) {
    const V x = V::Load(in + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] = ToFloat(x[i]);
    if (p.is_qk_norm) {
      const V w = V::Load(weight + column);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        y[i] = y[i] * rstd * ToFloat(w[i]);
        if constexpr (!FP8) y[i] = ToFloat(FromFloat<__nv_bfloat16>(y[i]));  // the contract rounds before the rotation
      }
    }
  };
  auto store = [&](int column, float (&y)[VEC]) {
    if constexpr (FP8) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) y[i] *= p.qk_scale;
      StoreFp8<VEC>(static_cast<uint8_t*>(out) + out_offset + column, y, __NV_E4M3);
    } else {
      RoundTo<__nv_bfloat16, VEC>(y).Store(static_cast<__nv_bfloat16*>(out) + out_offset + column);
    }
  };

  for (int item = threadIdx.x; item < heads * per_head; item += blockDim.x) {
    const int inside = item % per_head * VEC;
    const int column = item / per_head * d + inside;
    float a[VEC], b[VEC];
    load(column, a);
    load(column + half, b);
    if (p.interleave) {
#pragma unroll
      for (int i = 0; i < VEC; i += 2) {
        const float2 ta = turn[(inside + i) / 2], tb = turn[(inside + half + i) / 2];
        const float a0 = a[i], b0 = b[i];
        a[i] = a0 * ta.x - a[i + 1] * ta.y;
        a[i + 1] = a[i + 1] * ta.x + a0 * ta.y;
        b[i] = b0 * tb.x - b[i + 1] * tb.y;
        b[i + 1] = b[i + 1] * tb.x + b0 * tb.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float2 t = turn[inside + i];
        const float a0 = a[i];
        a[i] = a0 * t.x - b[i] * t.y;
        b[i] = b[i] * t.x + a0 * t.y;
      }
    }
    store(column, a);
    store(column + half, b);
  }
}

template <bool FP8>
__global__ void __launch_bounds__(QK_THREADS) QkRMSNormRopeKernel(const __grid_constant__ QkRMSNormRopeParams p) {
  constexpr int VEC = 8;
  __shared__ float scratch[2][32];
  __shared__ float2 turn[128];  // (cos, sin) of each pair, head_dim <= 256
  const int64_t token = blockIdx.x;
  const int in_frame = int(token % (int64_t(p.ppf) * p.pph * p.ppw)) % (p.pph * p.ppw);
  const int frame = int(token % (int64_t(p.ppf) * p.pph * p.ppw)) / (p.pph * p.ppw);
  for (int i = threadIdx.x; i < p.head_dim / 2; i += blockDim.x) {
    float sine, cosine;
    sincosf(PairAngle(p, i, frame, in_frame / p.ppw, in_frame % p.ppw), &sine, &cosine);
    turn[i] = make_float2(cosine * p.attention_factor, sine * p.attention_factor);
  }
  __syncthreads();

  const int q_width = p.num_heads_q * p.head_dim, k_width = p.num_heads_k * p.head_dim,
            v_width = p.num_heads_v * p.head_dim;
  const __nv_bfloat16* row = p.qkv + token * (q_width + k_width + v_width);
  RotateHeads<FP8>(p, row, p.q_weight, p.q_out, token * q_width, p.num_heads_q, scratch[0], turn);
  RotateHeads<FP8>(p, row + q_width, p.k_weight, p.k_out, token * k_width, p.num_heads_k, scratch[1], turn);

  const __nv_bfloat16* v = row + q_width + k_width;
  for (int c = threadIdx.x * VEC; c < v_width; c += blockDim.x * VEC) {
    const auto x = Vec<__nv_bfloat16, VEC>::Load(v + c);
    if constexpr (FP8) {
      float y[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) y[i] = ToFloat(x[i]) * p.v_scale;
      StoreFp8<VEC>(static_cast<uint8_t*>(p.v_out) + token * v_width + c, y, __NV_E4M3);
    } else {
      x.Store(static_cast<__nv_bfloat16*>(p.v_out) + token * v_width + c);
    }
  }
}

}  // namespace norm

FLASHINFER_INLINE Status QkRMSNormRope(const QkRMSNormRopeParams& p, Stream stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.num_tokens > INT32_MAX || p.head_dim > 256 || p.head_dim % 16 != 0) return cudaErrorInvalidValue;
  auto kernel = p.output_fp8 ? norm::QkRMSNormRopeKernel<true> : norm::QkRMSNormRopeKernel<false>;
  return Launch(kernel, dim3(p.num_tokens), dim3(norm::QK_THREADS), false, stream, p);
}

}  // namespace flashinfer
