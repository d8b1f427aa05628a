// SPDX-License-Identifier: Apache-2.0
// Routing of a mixture-of-experts layer on CUDA; parameters in route.h. Bound by latency: one warp per token
// (route_token.cuh).
//   test  pytest tests/fused_moe/test_moe_routing.py      bench  python benchmarks/bench_moe_routing.py
#pragma once
#include "route_token.cuh"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"

namespace flashinfer {
namespace moe {

constexpr int ROUTE_WARPS = MOE_ROUTE_MAX_BLOCK_TOKENS;  // most tokens of a block

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

template <int PER_LANE>
__global__ void __launch_bounds__(ROUTE_WARPS * 32) MoeRouteKernel(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ float shared_values[];  // (block_tokens, num_experts) if there are groups
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t(blockIdx.x) * p.block_tokens + warp;
  if (token >= p.tokens) return;
  const RoutedSlot chosen = ChooseExperts<PER_LANE>(p, token, shared_values + warp * p.num_experts);
  const float weight = WeightOf(p, chosen);
  if (lane >= p.top_k) return;
  const int64_t slot = token * p.top_k + lane;
  SetNumber(p.weights, slot, weight);
  p.experts[slot] = chosen.expert;
  if (p.replay != nullptr) p.replay[slot] = int16_t(chosen.expert);
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
    const int64_t id = p.input_ids[token];
    expert = id >= 0 && id < p.vocabulary ? p.table[id * p.top_k + lane] : -1;
    if (expert < 0 || expert >= p.num_experts) expert = -1;
    if (expert >= 0) {
      const float x = p.logits[token * p.num_experts + expert];
      weight = sqrtf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
    }
  }
  const float sum = WarpSum(weight);
  weight = expert < 0 ? 0.f : weight / sum;
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
