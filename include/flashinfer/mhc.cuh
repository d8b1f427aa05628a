// SPDX-License-Identifier: Apache-2.0
// Manifold hyper-connections on CUDA; formulas and parameters in mhc.h. Bound by memory: a token moves 9 * hidden (post) or
// 5 * hidden (pre) numbers.
// A thread has 8 columns of all four streams: five (four) loads of 16 bytes, issued together, then the stores. The mixing
// weights of a token are the same for its whole block.
// Sinkhorn's 40 dependent steps take a thread about a microsecond, whatever the token's width. So the first blocks of the
// grid do nothing else, a thread for each token, beside the blocks that move the streams. Where the sum of squares comes from
// the streams (prenorm), a block has a token: it keeps the columns in registers between the sum and the result.
//   test  pytest tests/mhc      bench  python benchmarks/bench_mhc.py
#pragma once
#include "mhc.h"
#include "ptx/math.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"
#include "warp.cuh"

namespace flashinfer {
namespace mhc {

constexpr int THREADS = 128;       // threads of a block of pre
constexpr int POST_THREADS = 448;  // most threads of a block of post. H200, 4096 x 7168: 128.5 us, with 128 132.5 us
constexpr int VEC = 8;             // columns of a thread
constexpr int PRENORM_THREADS = 1024;
constexpr float LOG2_E = 1.4426950409f;

struct DeviceExp {
  __device__ __forceinline__ float operator()(float x) const { return ptx::Exp2(LOG2_E * x); }
};
struct DeviceReciprocal {
  __device__ __forceinline__ float operator()(float x) const { return ptx::Reciprocal(x); }
};
struct DeviceRsqrt {
  __device__ __forceinline__ float operator()(float x) const { return rsqrtf(x); }
};

/// Load columns that no other thread reads, past L1 (evict-first in L2). H200, 4096 tokens of 7168: pre takes 75.1 us
/// instead of 76.8, but post 138.9 instead of 132.5.
template <int V>
__device__ __forceinline__ Vec<__nv_bfloat16, V> LoadOnce(const __nv_bfloat16* from) {
  using Columns = Vec<__nv_bfloat16, V>;
  Columns x;
  *reinterpret_cast<typename Columns::Bits*>(&x) = __ldcs(reinterpret_cast<const typename Columns::Bits*>(from));
  return x;
}

/// Sum of the streams, weighted: sum_j weight[j] * stream[j].
template <int N>
__device__ __forceinline__ void AddStream(float (&sum)[N], const Vec<__nv_bfloat16, N>& x, float weight) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += x.Float(i) * weight;
}

/// Grid (chunks of a token, tokens). V columns a thread: 8, or 1 where rows are not aligned to 16 bytes.
template <int V>
__global__ void __launch_bounds__(POST_THREADS) MhcPostKernel(const __grid_constant__ MhcPostParams p) {
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V;
  if (column >= p.hidden) return;
  using Columns = Vec<__nv_bfloat16, V>;
  for (int64_t t = blockIdx.y; t < p.tokens; t += gridDim.y) {
    const __nv_bfloat16* residual = p.residual + t * MHC_STREAMS * p.hidden + column;
    const Columns x = Columns::Load(p.x + t * p.hidden + column);
    Columns stream[MHC_STREAMS];
#pragma unroll
    for (int i = 0; i < MHC_STREAMS; ++i) stream[i] = Columns::Load(residual + i * p.hidden);
    const float *post = p.post + t * MHC_STREAMS, *comb = p.comb + t * MHC_STREAMS * MHC_STREAMS;
    __nv_bfloat16* out = p.out + t * MHC_STREAMS * p.hidden + column;
#pragma unroll
    for (int j = 0; j < MHC_STREAMS; ++j) {
      float y[V] = {};
      AddStream(y, x, post[j]);
#pragma unroll
      for (int i = 0; i < MHC_STREAMS; ++i) AddStream(y, stream[i], comb[i * MHC_STREAMS + j]);
      RoundTo<__nv_bfloat16, V>(y).Store(out + j * p.hidden);
    }
  }
}

/// Weights of the streams in layer_input, the same in all threads of a block.
__device__ __forceinline__ void PreWeights(const MhcPreParams& p, int64_t token, float mean,
                                           float (&pre)[MHC_STREAMS]) {
  const float scale = rsqrtf(mean + p.rms_eps) * p.scale[0];
  float m[MHC_STREAMS];
  LoadMix<MHC_PRE>(p, token, m);
#pragma unroll
  for (int j = 0; j < MHC_STREAMS; ++j) {
    pre[j] = ptx::Reciprocal(1.f + DeviceExp()(-(m[j] * scale + p.base[MHC_PRE + j]))) + p.pre_eps;
  }
}

__device__ __forceinline__ void StoreMixed(const MhcPreParams& p, int64_t token, int64_t column,
                                           const Vec<__nv_bfloat16, VEC> (&stream)[MHC_STREAMS],
                                           const float (&pre)[MHC_STREAMS]) {
  float y[VEC] = {};
#pragma unroll
  for (int j = 0; j < MHC_STREAMS; ++j) AddStream(y, stream[j], pre[j]);
  RoundTo<__nv_bfloat16, VEC>(y).Store(p.layer_input + token * p.hidden + column);
}

__device__ __forceinline__ void LoadStreams(const MhcPreParams& p, int64_t token, int64_t column,
                                            Vec<__nv_bfloat16, VEC> (&stream)[MHC_STREAMS]) {
  const __nv_bfloat16* residual = p.residual + token * MHC_STREAMS * p.hidden + column;
#pragma unroll
  for (int j = 0; j < MHC_STREAMS; ++j) stream[j] = LoadOnce<VEC>(residual + j * p.hidden);
}

/// Blocks [0, mix_blocks): post and comb, a thread for each token. Further blocks: `chunks` of each token.
__global__ void MhcPreKernel(const __grid_constant__ MhcPreParams p, uint32_t mix_blocks, uint32_t chunks) {
  if (blockIdx.x < mix_blocks) {
    const int64_t token = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token < p.tokens) {
      PostAndComb(p, token, SquareSum(p, token) / p.k, DeviceExp(), DeviceReciprocal(), DeviceRsqrt());
    }
    return;
  }
  const uint32_t block = blockIdx.x - mix_blocks;
  const int64_t token = block / chunks, column = (int64_t(block % chunks) * blockDim.x + threadIdx.x) * VEC;
  if (column >= p.hidden) return;
  Vec<__nv_bfloat16, VEC> stream[MHC_STREAMS];
  LoadStreams(p, token, column, stream);
  float pre[MHC_STREAMS];
  PreWeights(p, token, SquareSum(p, token) / p.k, pre);
  StoreMixed(p, token, column, stream, pre);
}

/// A block for each token. The first `blockDim.x * VEC` columns stay in registers, further ones are read again.
__global__ void __launch_bounds__(PRENORM_THREADS) MhcPrenormKernel(const __grid_constant__ MhcPreParams p) {
  __shared__ float scratch[32];
  const int64_t token = blockIdx.x, first = int64_t(threadIdx.x) * VEC, step = int64_t(blockDim.x) * VEC;
  Vec<__nv_bfloat16, VEC> kept[MHC_STREAMS], stream[MHC_STREAMS];
  float squares = 0.f;
  const auto add = [&](const Vec<__nv_bfloat16, VEC>(&x)[MHC_STREAMS]) {
#pragma unroll
    for (int j = 0; j < MHC_STREAMS; ++j) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) squares += x[j].Float(i) * x[j].Float(i);
    }
  };
  if (first < p.hidden) {
    LoadStreams(p, token, first, kept);
    add(kept);
  }
  for (int64_t column = first + step; column < p.hidden; column += step) {
    LoadStreams(p, token, column, stream);
    add(stream);
  }
  const float mean = BlockSum(squares, scratch) / p.k;
  float pre[MHC_STREAMS];
  PreWeights(p, token, mean, pre);
  if (first < p.hidden) StoreMixed(p, token, first, kept, pre);
  for (int64_t column = first + step; column < p.hidden; column += step) {
    LoadStreams(p, token, column, stream);
    StoreMixed(p, token, column, stream, pre);
  }
  // The last warp often has no columns, and its lanes are the last to be needed.
  if (threadIdx.x == blockDim.x - 32) {
    PostAndComb(p, token, mean, DeviceExp(), DeviceReciprocal(), DeviceRsqrt());
  }
}

}  // namespace mhc

FLASHINFER_INLINE Status MhcPost(const MhcPostParams& p, Stream stream) {
  using namespace mhc;
  if (p.tokens == 0) return cudaSuccess;
  const bool aligned = p.hidden % VEC == 0 && IsAligned(p.x, 16) && IsAligned(p.residual, 16) && IsAligned(p.out, 16);
  const int64_t vectors = CeilDiv(p.hidden, aligned ? VEC : 1), chunks = CeilDiv(vectors, POST_THREADS);
  const dim3 grid(chunks, std::min<int64_t>(p.tokens, 65535)), block(CeilDiv(CeilDiv(vectors, chunks), 32) * 32);
  return aligned ? Launch(MhcPostKernel<VEC>, grid, block, false, stream, p)
                 : Launch(MhcPostKernel<1>, grid, block, false, stream, p);
}

FLASHINFER_INLINE Status MhcPre(const MhcPreParams& p, Stream stream) {
  using namespace mhc;
  if (p.tokens == 0) return cudaSuccess;
  if (p.sqrsum == nullptr) {
    const int64_t threads =
        p.block_size > 0 ? p.block_size : std::min<int64_t>(PRENORM_THREADS, CeilDiv(p.hidden, VEC * 32) * 32);
    return Launch(MhcPrenormKernel, dim3(p.tokens), dim3(threads), false, stream, p);
  }
  const int64_t threads = p.block_size > 0 ? p.block_size : THREADS;
  const int64_t chunks = CeilDiv(p.hidden, VEC * threads), mix_blocks = CeilDiv(p.tokens, threads);
  return Launch(MhcPreKernel, dim3(mix_blocks + chunks * p.tokens), dim3(threads), false, stream, p,
                uint32_t(mix_blocks), uint32_t(chunks));
}

}  // namespace flashinfer
