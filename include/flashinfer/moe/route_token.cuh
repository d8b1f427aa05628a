// SPDX-License-Identifier: Apache-2.0
// Routing of one token by a warp: the experts and their weights, with expert i * 32 + lane in register i of a lane. A round
// of the selection takes two reductions over the warp: the largest key, then the smallest number of an expert that has it.
// The kernel of route.cuh, and layers that route their own token (mono/route.cuh), have the same bits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "route.h"
#include "../ptx/math.cuh"
#include "../ptx/reduce.cuh"
#include "../vec_dtypes.cuh"
#include "../warp.cuh"

namespace flashinfer {
namespace moe {

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

__device__ __forceinline__ float Sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Softmax and sigmoid are both an exponential and a quotient, which take most of the code: one of each serves both.
__device__ __forceinline__ float ExponentialOf(MoeScore score, float logit, float most) {
  return expf(score == MoeScore::kSoftmax ? logit - most : -logit);
}

/// A score as a quotient, x from 0 to 1 and y from 1, unless they are NaN.
struct ScoreParts {
  float x, y;

  __device__ __forceinline__ ScoreParts(MoeScore score, float exponential, float sum)
      : x(score == MoeScore::kSoftmax ? exponential : 1.f), y(score == MoeScore::kSoftmax ? sum : 1.f + exponential) {}

  /// Return true if no step of Quotient leaves the normal numbers.
  __device__ __forceinline__ bool IsNormal() const { return (x == 0.f || x >= 0x1p-100f) && y <= 0x1p100f; }
  /// Return x / y to the last bit if IsNormal(): the steps of the compiler's division without its branch. Eight divisions
  /// with branches are computed one after the other.
  __device__ __forceinline__ float Quotient() const {
    float r = ptx::Reciprocal(y);
    r = fmaf(r, fmaf(-y, r, 1.f), r);
    const float q = x * r;
    return fmaf(r, fmaf(-y, q, x), q);
  }
};

__device__ __forceinline__ float ScoreOf(MoeScore score, float exponential, float sum) {
  const ScoreParts parts(score, exponential, sum);
  return parts.x / parts.y;
}

/// Replace exponentials by scores.
template <int PER_LANE>
__device__ __forceinline__ void ComputeScores(MoeScore score, float sum, float (&x)[PER_LANE]) {
  bool is_normal = PER_LANE <= 16;  // more at once would take registers from other tokens
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) is_normal &= ScoreParts(score, x[i], sum).IsNormal();
  if (__all_sync(ALL_LANES, is_normal)) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = ScoreParts(score, x[i], sum).Quotient();
  } else {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = ScoreOf(score, x[i], sum);
  }
}

// Keys order as their numbers do. An expert that is chosen has key 0, one of another group 1, NaN 2; minus infinity has
// 0x007FFFFF.
constexpr uint32_t TAKEN = 0, OTHER_GROUP = 1, NOT_A_NUMBER = 2;

__device__ __forceinline__ uint32_t KeyOf(float x) {
  if (x != x) return NOT_A_NUMBER;
  const uint32_t bits = __float_as_uint(x + 0.f);  // the two zeros are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Return the largest of COUNT keys of a lane. Halves are compared: a chain of comparisons has a longer latency.
template <int FIRST, int COUNT, int PER_LANE>
__device__ __forceinline__ uint32_t LargestOf(const uint32_t (&keys)[PER_LANE]) {
  if constexpr (COUNT == 1) {
    return keys[FIRST];
  } else {
    return max(LargestOf<FIRST, COUNT / 2>(keys), LargestOf<FIRST + COUNT / 2, COUNT - COUNT / 2>(keys));
  }
}

/// Return the number of the first of COUNT keys that equals `key`; PER_LANE if there is none.
template <int FIRST, int COUNT, int PER_LANE>
__device__ __forceinline__ int FirstOf(const uint32_t (&keys)[PER_LANE], uint32_t key) {
  if constexpr (COUNT == 1) {
    return keys[FIRST] == key ? FIRST : PER_LANE;
  } else {
    return min(FirstOf<FIRST, COUNT / 2>(keys, key), FirstOf<FIRST + COUNT / 2, COUNT - COUNT / 2>(keys, key));
  }
}

/// Return the number of the best expert and mark it as taken.
template <int PER_LANE>
__device__ __forceinline__ int TakeBest(uint32_t (&keys)[PER_LANE]) {
  const int lane = threadIdx.x % 32;
  const uint32_t best = LargestOf<0, PER_LANE>(keys), most = ptx::ReduceMax(best);
  const int at = FirstOf<0, PER_LANE>(keys, best);
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

/// Numbers of the expert in a lane's slot; lanes from top_k on have those of another expert.
struct RoutedSlot {
  int32_t expert;
  float logit;
  float most, sum;  // largest logit and sum of exponentials of the token
};

/// Choose the experts of a token, those of lane s for slot s. A warp calls it; `values` is shared memory for num_experts
/// numbers, if there are groups.
template <int PER_LANE>
__device__ __forceinline__ RoutedSlot ChooseExperts(const MoeRouteParams& p, int64_t token, float* values) {
  const int lane = threadIdx.x % 32;
  float x[PER_LANE], most = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + lane;
    x[i] = expert < p.num_experts ? NumberAt(p.logits, token * p.logit_stride + expert) : -INFINITY;
    most = fmaxf(most, x[i]);
  }
  if (p.score == MoeScore::kSoftmax) most = WarpMax(most);
  if (p.score != MoeScore::kLogit) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float exponential = ExponentialOf(p.score, x[i], most);  // without a branch
      x[i] = i * 32 + lane < p.num_experts ? exponential : 0.f;
      sum += x[i];
    }
    if (p.score == MoeScore::kSoftmax) sum = WarpSum(sum);
    ComputeScores(p.score, sum, x);
  }
  uint32_t keys[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = TAKEN;
    if (expert >= p.num_experts) continue;
    if (p.bias.data != nullptr) x[i] += NumberAt(p.bias, expert);
    keys[i] = KeyOf(x[i]);
    if (p.groups > 1) values[expert] = x[i];
  }
  if (p.groups > 1) {
    __syncwarp();
    KeepGroups(p, values, keys);
  }
  int chosen = 0;
#pragma unroll 1
  for (int slot = 0; slot < p.top_k; ++slot) {
    const int expert = TakeBest(keys);
    if (slot == lane) chosen = expert;
  }
  // The logit is loaded again: registers of another lane have it, and scores have the bias added.
  return {chosen, NumberAt(p.logits, token * p.logit_stride + chosen), most, sum};
}

/// Return the weight of this lane's expert. All lanes of a warp call it.
__device__ __forceinline__ float WeightOf(const MoeRouteParams& p, const RoutedSlot& slot) {
  const bool is_chosen = int(threadIdx.x % 32) < p.top_k;
  float score = slot.logit;
  if (p.score != MoeScore::kLogit) score = ScoreOf(p.score, ExponentialOf(p.score, score, slot.most), slot.sum);
  switch (p.weight) {
    case MoeWeight::kNormalized:
      return score / (WarpSum(is_chosen ? score : 0.f) + MOE_ROUTE_EPSILON) * p.factor;
    case MoeWeight::kSoftmaxOfChosen: {
      const float most = WarpMax(is_chosen ? slot.logit : -INFINITY), x = expf(slot.logit - most);
      return x / WarpSum(is_chosen ? x : 0.f);
    }
    case MoeWeight::kSigmoidOfLogit:
      return Sigmoid(slot.logit);
    default:
      return score;
  }
}

}  // namespace moe
}  // namespace flashinfer
