// SPDX-License-Identifier: Apache-2.0
// Experts of one token from its router logits, found by each block of fp8_one.cuh for itself: a warp chooses them with
// the arithmetic of moe/route_token.cuh, and writes the table of experts_of_one.cuh. The token has an expert once, and
// this rank has all of them. Factors are computed when the first weights have been requested, which wait for experts
// only.
#pragma once
#include "../route_token.cuh"
#include "experts_of_one.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int ROUTE_PER_LANE = 8;  // experts of a lane that registers hold

/// Keys of the experts in shared memory: a word is left out after 32, so that the experts of a lane have all banks.
using RouteKeys = uint32_t[MOE_ROUTE_MAX_EXPERTS / 32][33];

/// State that a lane keeps until factors are computed.
struct Routed {
  moe::RoutedSlot slot;
  float* factor;  // place for the factor of the lane's slot, or null if it has none
};

__device__ __forceinline__ MoeRouteParams RouteParamsOf(const MonoParams& p) {
  MoeRouteParams to{};
  to.logits = {const_cast<void*>(p.routing.logits), MoeFloat::kBfloat}, to.logit_stride = p.routing.logit_stride;
  to.num_experts = p.num_experts, to.top_k = p.top_k, to.groups = to.top_groups = 1;
  to.score = p.routing.score, to.weight = p.routing.weight;
  return to;
}

/// Choose the experts of the token by softmax or sigmoid as ChooseExperts does, for more experts than registers hold: loops are
/// shorter to compile, and a round takes as long for any number of experts. Each lane knows the best of its experts; when
/// that one is taken, the others of the lane are compared by all lanes.
__device__ __forceinline__ moe::RoutedSlot ChooseFromMany(const MoeRouteParams& p, RouteKeys& keys) {
  const int lane = int(threadIdx.x) % 32;
  float most = -INFINITY, sum = 0.f;
  if (p.score == MoeScore::kSoftmax) {
#pragma unroll 4
    for (int i = lane; i < p.num_experts; i += 32) most = fmaxf(most, moe::NumberAt(p.logits, i));
    most = WarpMax(most);
#pragma unroll 2
    for (int i = lane; i < p.num_experts; i += 32) {
      sum += moe::ExponentialOf(p.score, moe::NumberAt(p.logits, i), most);
    }
    sum = WarpSum(sum);
  }
  uint32_t best = moe::TAKEN, number = 0;
#pragma unroll 2
  for (int i = lane; i < p.num_experts; i += 32) {
    const float exponential = moe::ExponentialOf(p.score, moe::NumberAt(p.logits, i), most);
    const uint32_t key = moe::KeyOf(moe::ScoreOf(p.score, exponential, sum));
    keys[i / 32][lane] = key;
    if (key > best) best = key, number = uint32_t(i);
  }
  __syncwarp();
  int chosen = 0;
#pragma unroll 1
  for (int slot = 0; slot < p.top_k; ++slot) {
    const uint32_t largest = ptx::ReduceMax(best);
    const int expert = int(ptx::ReduceMin(best == largest ? number : ~0u));
    if (slot == lane) chosen = expert;
    const int other = lane * 32 + expert % 32;  // an expert of the lane whose expert was taken
    uint32_t key = moe::TAKEN;
    if (other == expert) {
      keys[lane][expert % 32] = moe::TAKEN;
    } else if (other < p.num_experts) {
      key = keys[lane][expert % 32];
    }
    const uint32_t next = ptx::ReduceMax(key), next_number = ptx::ReduceMin(key == next ? uint32_t(other) : ~0u);
    if (lane == expert % 32) best = next, number = next_number;
  }
  return {chosen, moe::NumberAt(p.logits, chosen), most, sum};
}

/// Choose the experts of the token. A warp calls it.
__device__ __forceinline__ moe::RoutedSlot Choose(const MonoParams& p, RouteKeys& keys) {
  const MoeRouteParams params = RouteParamsOf(p);
  if (p.num_experts <= ROUTE_PER_LANE * 32) return moe::ChooseExperts<ROUTE_PER_LANE>(params, 0, nullptr);
  return ChooseFromMany(params, keys);
}

/// Fill the table of the block but for the factors; all threads of the block call it. `keys` is memory that nobody uses before
/// the end, which is a barrier.
__device__ __forceinline__ Routed RouteOneToken(const MonoParams& p, TokenExperts& to, RouteKeys& keys) {
  Routed routed{};
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    routed.slot = Choose(p, keys);
    const int expert = routed.slot.expert;
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < p.top_k; ++i) rank += __shfl_sync(~0u, expert, i) < expert;
    if (lane < p.top_k) to.expert[rank] = expert, to.slot[rank] = lane, routed.factor = &to.factor[rank];
  }
  __syncthreads();
  return routed;
}

/// Write the factors, which are read behind the barrier of the grid.
__device__ __forceinline__ void WriteFactors(const MonoParams& p, const Routed& routed) {
  if (threadIdx.x >= 32) return;
  const float weight = moe::WeightOf(RouteParamsOf(p), routed.slot);
  if (routed.factor != nullptr) *routed.factor = weight;
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
