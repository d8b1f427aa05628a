// SPDX-License-Identifier: Apache-2.0
// Experts of few tokens from their router logits, found by each block of mono.cuh for itself: a warp for each token chooses
// them with the arithmetic of moe_routing_token.cuh, and all threads write the tables of mono_pairs.cuh. A token has an
// expert once, and this rank has all of them. Factors are computed when the first weights have been requested, which wait
// for experts only.
#pragma once
#include "../moe_routing_token.cuh"
#include "mono_pairs.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int ROUTE_PER_LANE = 8;  // experts of a lane that registers hold

/// Keys of a token's experts in shared memory: a word is left out after 32, so that the experts of a lane have all banks.
using RouteKeys = uint32_t[MOE_ROUTE_MAX_EXPERTS / 32][33];

/// State that a lane keeps until factors are computed.
struct Routed {
  moe::RoutedSlot slot;
  Choice* choice;  // entry of the lane's slot, or null if it has none
};

__device__ __forceinline__ MoeRouteParams RouteParamsOf(const MonoParams& p) {
  MoeRouteParams to{};
  to.logits = {const_cast<void*>(p.routing.logits), MoeFloat::kBfloat}, to.logit_stride = p.routing.logit_stride;
  to.num_experts = p.num_experts, to.top_k = p.top_k, to.groups = to.top_groups = 1;
  to.score = p.routing.score, to.weight = p.routing.weight;
  return to;
}

/// Choose the experts of a token by softmax or sigmoid as ChooseExperts does, for more experts than registers hold: loops are
/// shorter to compile, and a round takes as long for any number of experts. Each lane knows the best of its experts; when
/// that one is taken, the others of the lane are compared by all lanes.
__device__ __forceinline__ moe::RoutedSlot ChooseFromMany(const MoeRouteParams& p, int token, RouteKeys& keys) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t row = token * p.logit_stride;
  float most = -INFINITY, sum = 0.f;
  if (p.score == MoeScore::kSoftmax) {
#pragma unroll 4
    for (int i = lane; i < p.num_experts; i += 32) most = fmaxf(most, moe::NumberAt(p.logits, row + i));
    most = WarpMax(most);
#pragma unroll 2
    for (int i = lane; i < p.num_experts; i += 32) {
      sum += moe::ExponentialOf(p.score, moe::NumberAt(p.logits, row + i), most);
    }
    sum = WarpSum(sum);
  }
  uint32_t best = moe::TAKEN, number = 0;
#pragma unroll 2
  for (int i = lane; i < p.num_experts; i += 32) {
    const float exponential = moe::ExponentialOf(p.score, moe::NumberAt(p.logits, row + i), most);
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
  return {chosen, moe::NumberAt(p.logits, row + chosen), most, sum};
}

/// Choose the experts of a token. A warp calls it; `keys` has an entry for each token.
__device__ __forceinline__ moe::RoutedSlot Choose(const MonoParams& p, int token, RouteKeys* keys) {
  const MoeRouteParams params = RouteParamsOf(p);
  if (p.num_experts <= ROUTE_PER_LANE * 32) return moe::ChooseExperts<ROUTE_PER_LANE>(params, token, nullptr);
  return ChooseFromMany(params, token, keys[token]);
}

/// Bits of the chosen experts, in shared memory.
using ChosenBits = uint32_t[MOE_ROUTE_MAX_EXPERTS / 32];

/// Return the number of chosen experts before `expert`.
__device__ __forceinline__ int RankOf(const ChosenBits& chosen, int expert) {
  int rank = 0;
#pragma unroll 1
  for (int first = 0; first * 32 < expert; first += ROUTE_PER_LANE) {
#pragma unroll
    for (int i = first; i < first + ROUTE_PER_LANE; ++i) {
      const uint32_t before = i < expert / 32 ? ~0u : i == expert / 32 ? (1u << expert % 32) - 1u : 0u;
      rank += __popc(chosen[i] & before);
    }
  }
  return rank;
}

/// Fill the tables but for the factors; all threads of the block call it, at least 32 for each token. `keys` is memory for
/// each token that nobody uses before the end, which is a barrier.
template <int TOKENS>
__device__ __forceinline__ Routed RouteTokens(const MonoParams& p, Choices<TOKENS>& to, RouteKeys* keys) {
  __shared__ __align__(16) ChosenBits chosen;
  const int thread = int(threadIdx.x), threads = int(blockDim.x), token = thread / 32, lane = thread % 32;
  const bool has_slot = token < p.tokens && lane < p.top_k;
  for (int i = thread; i < int(sizeof(chosen) / 4); i += threads) chosen[i] = 0;
  for (int i = thread; i < p.tokens * p.top_k * TOKENS; i += threads) to.of[i / TOKENS][i % TOKENS] = Choice{-1, 0.f};
  __syncthreads();
  Routed routed{};
  if (token < p.tokens) routed.slot = Choose(p, token, keys);
  const int expert = routed.slot.expert;
  if (has_slot) atomicOr(&chosen[expert / 32], 1u << expert % 32);
  __syncthreads();
  for (int i = thread; i < p.num_experts; i += threads) {
    if (chosen[i / 32] >> i % 32 & 1u) to.active[RankOf(chosen, i)] = i;
  }
  if (thread == 0) to.count = RankOf(chosen, p.num_experts);
  if (has_slot) {
    routed.choice = &to.of[RankOf(chosen, expert)][token];
    routed.choice->pair = token * p.top_k + lane;
  }
  __syncthreads();
  return routed;
}

/// The same for one token, whose warp needs no other: entries of other tokens are left out.
template <int TOKENS>
__device__ __forceinline__ Routed RouteOneToken(const MonoParams& p, Choices<TOKENS>& to, RouteKeys* keys) {
  Routed routed{};
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    routed.slot = Choose(p, 0, keys);
    const int expert = routed.slot.expert;
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < p.top_k; ++i) rank += __shfl_sync(~0u, expert, i) < expert;
    if (lane < p.top_k) {
      routed.choice = &to.of[rank][0];
      routed.choice->pair = lane, to.active[rank] = expert;
    }
    if (lane == 0) to.count = p.top_k;
  }
  __syncthreads();
  return routed;
}

/// Write the factors, which are read behind the barrier of the grid.
__device__ __forceinline__ void WriteFactors(const MonoParams& p, const Routed& routed) {
  if (int(threadIdx.x) / 32 >= p.tokens) return;
  const float weight = moe::WeightOf(RouteParamsOf(p), routed.slot);
  if (routed.choice != nullptr) routed.choice->factor = weight;
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
