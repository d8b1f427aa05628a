// SPDX-License-Identifier: Apache-2.0
// Common parts of the CUDA kernels of SSD: states in memory, the decays of a chunk.
#pragma once
#include <algorithm>

#include "../../ptx/math.cuh"
#include "../../utils.cuh"
#include "../../warp.cuh"
#include "../rules.h"
#include "../ssd.h"
#include "../weights.cuh"

namespace flashinfer {
namespace recurrent {

constexpr float SSD_LOG2_E = 1.4426950409f;

__device__ __forceinline__ float SsdLoad(const SsdStates& s, int64_t at) {
  return WeightAt({s.data, s.type, 0, 0, 0, 0}, at);
}

/// Store two neighbours; `at` is even.
__device__ __forceinline__ void SsdStore(const SsdStates& s, int64_t at, float x, float y) {
  switch (s.type) {
    case WeightType::kFloat:
      *reinterpret_cast<float2*>(static_cast<float*>(s.data) + at) = make_float2(x, y);
      break;
    case WeightType::kBfloat16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(s.data) + at) = __floats2bfloat162_rn(x, y);
      break;
    default:
      *reinterpret_cast<__half2*>(static_cast<__half*>(s.data) + at) = __floats2half2_rn(x, y);
  }
}

/// Numbers of the tokens of a chunk, in shared memory. Logarithms are to base 2.
struct alignas(16) SsdDecays {
  float g[SSD_CHUNK];           ///< cumulated log decay, this token included
  float dt[SSD_CHUNK];          ///< processed; 0 past the chunk's end
  float from_begin[SSD_CHUNK];  ///< e^g
  float to_end[SSD_CHUNK];      ///< e^(g of the last token - g) dt: weight of a token in the next state
  float whole;                  ///< e^(g of the last token)
};

/// Processed dt of token i of a chunk of `length` tokens, 0 past its end.
template <typename Input>
__device__ __forceinline__ float ChunkDt(const SsdParams<Input>& p, const SsdSequence& s, int64_t at, int length, int i,
                                         int head, float bias) {
  if (i >= length) return 0.f;
  float dt = WeightAt(p.dt, s.batch * p.dt.batch + (at + i) * p.dt.token + head * p.dt.head) + bias;
  if (p.softplus) dt = Softplus(dt);
  return fminf(fmaxf(dt, p.dt_min), p.dt_max);
}

/// Compute the decays of a chunk; called by one warp with the dt of tokens 2 * lane and 2 * lane + 1.
__device__ __forceinline__ void ChunkDecays(float first_dt, float second_dt, float a, SsdDecays& to) {
  const int lane = threadIdx.x % 32;
  const float first = Mamba2Rule::LogDecay(first_dt, a) * SSD_LOG2_E,
              second = Mamba2Rule::LogDecay(second_dt, a) * SSD_LOG2_E;
  const float after = WarpInclusiveScan(first + second), last = __shfl_sync(ALL_LANES, after, 31);
  const float before = after - second;
  *reinterpret_cast<float2*>(&to.g[2 * lane]) = make_float2(before, after);
  *reinterpret_cast<float2*>(&to.dt[2 * lane]) = make_float2(first_dt, second_dt);
  *reinterpret_cast<float2*>(&to.from_begin[2 * lane]) = make_float2(ptx::Exp2(before), ptx::Exp2(after));
  *reinterpret_cast<float2*>(&to.to_end[2 * lane]) =
      make_float2(ptx::Exp2(last - before) * first_dt, ptx::Exp2(last - after) * second_dt);
  if (lane == 0) to.whole = ptx::Exp2(last);
}

}  // namespace recurrent
}  // namespace flashinfer
