// SPDX-License-Identifier: Apache-2.0
// Routing of a mixture-of-experts layer on CUDA; parameters in moe_routing.h. Bound by latency: one warp per token,
// expert i * 32 + lane in register i of a lane. A round of the selection takes two reductions over the warp: the largest
// key, then the smallest number of an expert that has it.
//   test  pytest tests/fused_moe/test_moe_routing.py      bench  python benchmarks/bench_moe_routing.py
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "moe_routing.h"
#include "ptx/pdl.cuh"
#include "ptx/reduce.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"
#include "warp.cuh"

namespace flashinfer {
namespace moe {

constexpr int ROUTE_WARPS = MOE_ROUTE_MAX_BLOCK_TOKENS;  // most tokens of a block

__device__ __forceinline__ float NumberAt(const MoeNumbers& x, int64_t i) {
  switch (x.type) {
    case MoeFloat::kFloat:
      return static_cast<const float*>(x.data)[i];
    case MoeFloat::kHalf:
      return ToFloat(static_cast<const __half*>(x.data)[i]);
    default:
      return ToFloat(static_cast<const __nv_bfloat16*>(x.data)[i]);
  }
}

__device__ __forceinline__ void SetNumber(const MoeNumbers& x, int64_t i, float value) {
  switch (x.type) {
    case MoeFloat::kFloat:
      static_cast<float*>(x.data)[i] = value;
      break;
    case MoeFloat::kHalf:
      static_cast<__half*>(x.data)[i] = FromFloat<__half>(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(x.data)[i] = FromFloat<__nv_bfloat16>(value);
  }
}

__device__ __forceinline__ float Sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Keys order as their numbers do. An expert that is chosen has key 0, one of another group 1, NaN 2; minus infinity has
// 0x007FFFFF.
constexpr uint32_t TAKEN = 0, OTHER_GROUP = 1, NOT_A_NUMBER = 2;

__device__ __forceinline__ uint32_t KeyOf(float x) {
  if (x != x) return NOT_A_NUMBER;
  const uint32_t bits = __float_as_uint(x + 0.f);  // the two zeros are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Return the number of the best expert and mark it as taken.
template <int PER_LANE>
__device__ __forceinline__ int TakeBest(uint32_t (&keys)[PER_LANE]) {
  const int lane = threadIdx.x % 32;
  uint32_t best = keys[0];
  int at = 0;
#pragma unroll
  for (int i = 1; i < PER_LANE; ++i) {
    if (keys[i] > best) {
      best = keys[i];
      at = i;
    }
  }
  const uint32_t most = ptx::ReduceMax(best);
  const int expert = int(ptx::ReduceMin(best == most ? uint32_t(at * 32 + lane) : ~0u));
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (i * 32 + lane == expert) keys[i] = TAKEN;
  }
  return expert;
}

/// Give experts of all but the best groups a key below that of any number. `values` has the numbers that experts are
/// compared by, in shared memory; lane g adds up the two best of group g.
template <int PER_LANE>
__device__ __forceinline__ void KeepGroups(const MoeRouteParams& p, const float* values, uint32_t (&keys)[PER_LANE]) {
  const int lane = threadIdx.x % 32, size = p.num_experts / p.groups;
  uint32_t group_key[1] = {TAKEN};
  if (lane < p.groups) {
    float first = values[lane * size], second = 0.f;
    bool has_second = false;
    for (int i = 1; i < size; ++i) {
      const float x = values[lane * size + i];
      const bool is_first = KeyOf(x) > KeyOf(first);
      const float lower = is_first ? first : x;
      if (!has_second || KeyOf(lower) > KeyOf(second)) second = lower;
      if (is_first) first = x;
      has_second = true;
    }
    group_key[0] = KeyOf(has_second ? first + second : first);
  }
  uint32_t kept = 0;
  for (int i = 0; i < p.top_groups; ++i) kept |= 1u << TakeBest(group_key);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + lane;
    if (expert < p.num_experts && !(kept >> (expert / size) & 1)) keys[i] = OTHER_GROUP;
  }
}

/// Return the weight of this lane's expert, which has the logit and the score; lanes from top_k on have none.
__device__ __forceinline__ float WeightOf(const MoeRouteParams& p, float logit, float score) {
  const bool is_chosen = int(threadIdx.x % 32) < p.top_k;
  switch (p.weight) {
    case MoeWeight::kNormalized:
      return score / (WarpSum(is_chosen ? score : 0.f) + MOE_ROUTE_EPSILON) * p.factor;
    case MoeWeight::kSoftmaxOfChosen: {
      const float most = WarpMax(is_chosen ? logit : -INFINITY), x = expf(logit - most);
      return x / WarpSum(is_chosen ? x : 0.f);
    }
    case MoeWeight::kSigmoidOfLogit:
      return Sigmoid(logit);
    default:
      return score;
  }
}

template <int PER_LANE>
__global__ void __launch_bounds__(ROUTE_WARPS * 32) MoeRouteKernel(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ float shared_values[];  // (block_tokens, num_experts) if there are groups
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t(blockIdx.x) * p.block_tokens + warp;
  if (token >= p.tokens) return;
  float x[PER_LANE], most = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + lane;
    x[i] = expert < p.num_experts ? NumberAt(p.logits, token * p.logit_stride + expert) : -INFINITY;
    most = fmaxf(most, x[i]);
  }
  if (p.score == MoeScore::kSoftmax) {
    most = WarpMax(most);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      x[i] = i * 32 + lane < p.num_experts ? expf(x[i] - most) : 0.f;
      sum += x[i];
    }
    sum = WarpSum(sum);
  }
  uint32_t keys[PER_LANE];
  float* const values = shared_values + warp * p.num_experts;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = TAKEN;
    if (expert >= p.num_experts) continue;
    if (p.score == MoeScore::kSoftmax) x[i] /= sum;
    if (p.score == MoeScore::kSigmoid) x[i] = Sigmoid(x[i]);
    if (p.bias.data != nullptr) x[i] += NumberAt(p.bias, expert);
    keys[i] = KeyOf(x[i]);
    if (p.groups > 1) values[expert] = x[i];
  }
  if (p.groups > 1) {
    __syncwarp();
    KeepGroups(p, values, keys);
  }
  int chosen = 0;
  for (int slot = 0; slot < p.top_k; ++slot) {
    const int expert = TakeBest(keys);
    if (slot == lane) chosen = expert;
  }
  // The score without the bias, from the logit: registers of another lane have it.
  const float logit = NumberAt(p.logits, token * p.logit_stride + chosen);
  float score = logit;
  if (p.score == MoeScore::kSoftmax) score = expf(logit - most) / sum;
  if (p.score == MoeScore::kSigmoid) score = Sigmoid(logit);
  const float weight = WeightOf(p, logit, score);
  if (lane >= p.top_k) return;
  const int64_t slot = token * p.top_k + lane;
  SetNumber(p.weights, slot, weight);
  p.experts[slot] = chosen;
  if (p.replay != nullptr) p.replay[slot] = int16_t(chosen);
}

__global__ void __launch_bounds__(ROUTE_WARPS * 32) HashTopKKernel(const __grid_constant__ HashTopKParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = threadIdx.x % 32, slots = p.top_k + p.shared;
  const int64_t token = int64_t(blockIdx.x) * ROUTE_WARPS + threadIdx.x / 32;
  if (token >= p.tokens) return;
  int expert = p.num_experts;
  float weight = 0.f;
  if (lane < p.top_k) {
    expert = p.table[p.input_ids[token] * p.top_k + lane];
    const float x = p.logits[token * p.num_experts + expert];
    weight = sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  }
  weight /= WarpSum(weight);
  if (lane >= slots) return;
  p.weights[token * slots + lane] = lane < p.top_k ? weight : 1.f / p.factor;
  p.experts[token * slots + lane] = expert;
}

template <int PER_LANE>
Status Route(const MoeRouteParams& p, Stream stream) {
  const dim3 grid(unsigned(CeilDiv(p.tokens, p.block_tokens)));
  const size_t bytes = p.groups > 1 ? p.block_tokens * p.num_experts * sizeof(float) : 0;
  return LaunchShared(MoeRouteKernel<PER_LANE>, grid, dim3(p.block_tokens * 32), bytes, p.enable_pdl, stream, p);
}

}  // namespace moe

FLASHINFER_INLINE Status MoeRoute(const MoeRouteParams& p, Stream stream) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.num_experts <= 128) return moe::Route<4>(p, stream);
  if (p.num_experts <= 256) return moe::Route<8>(p, stream);
  return p.num_experts <= 512 ? moe::Route<16>(p, stream) : moe::Route<32>(p, stream);
}

FLASHINFER_INLINE Status HashTopK(const HashTopKParams& p, Stream stream) {
  if (p.tokens == 0) return cudaSuccess;
  const dim3 grid(unsigned(CeilDiv(p.tokens, moe::ROUTE_WARPS)));
  return Launch(moe::HashTopKKernel, grid, dim3(moe::ROUTE_WARPS * 32), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
