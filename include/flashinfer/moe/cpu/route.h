// SPDX-License-Identifier: Apache-2.0
// Routing of a mixture-of-experts layer on the CPU; parameters in moe/route.h. Tokens over threads.
//   test  pytest tests/fused_moe/test_moe_routing.py
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "../route.h"

namespace flashinfer {
namespace cpu {

/// Return number i of a row.
inline float NumberAt(const MoeNumbers& x, int64_t i) {
  float lanes[LANES];
  switch (x.type) {
    case MoeFloat::kFloat:
      return static_cast<const float*>(x.data)[i];
    case MoeFloat::kHalf:
      Store(lanes, Load(static_cast<const float16*>(x.data) + i, SomeLanes{1}));
      return lanes[0];
    default:
      Store(lanes, Load(static_cast<const bfloat16*>(x.data) + i, SomeLanes{1}));
      return lanes[0];
  }
}

inline void SetNumber(const MoeNumbers& x, int64_t i, float value) {
  switch (x.type) {
    case MoeFloat::kFloat:
      static_cast<float*>(x.data)[i] = value;
      break;
    case MoeFloat::kHalf:
      Store(static_cast<float16*>(x.data) + i, Broadcast(value), SomeLanes{1});
      break;
    default:
      Store(static_cast<bfloat16*>(x.data) + i, Broadcast(value), SomeLanes{1});
  }
}

inline float Sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

/// Return the index of the largest number of [begin, end) that is not `taken`; the first among equals, NaN last.
inline int32_t Largest(const float* x, const bool* taken, int32_t begin, int32_t end) {
  int32_t best = -1;
  for (int32_t i = begin; i < end; ++i) {
    if (taken[i]) continue;
    if (best < 0 || x[i] > x[best] || (std::isnan(x[best]) && !std::isnan(x[i]))) best = i;
  }
  return best;
}

/// Mark the experts of all groups as taken, but for the best groups.
inline void KeepGroups(const MoeRouteParams& p, const float* keys, bool* taken) {
  const int32_t size = p.num_experts / p.groups;
  float sums[MOE_ROUTE_MAX_GROUPS];
  bool chosen[MOE_ROUTE_MAX_GROUPS] = {};
  for (int32_t group = 0; group < p.groups; ++group) {
    const int32_t begin = group * size, first = Largest(keys, taken, begin, begin + size);
    sums[group] = keys[first];
    if (size == 1) continue;
    taken[first] = true;
    sums[group] += keys[Largest(keys, taken, begin, begin + size)];
    taken[first] = false;
  }
  for (int32_t i = 0; i < p.top_groups; ++i) chosen[Largest(sums, chosen, 0, p.groups)] = true;
  for (int32_t i = 0; i < p.num_experts; ++i) taken[i] = !chosen[i / size];
}

/// Turn the scores of the chosen experts into weights.
inline void WeighChosen(const MoeRouteParams& p, const float* logits, float* weights, const int32_t* experts) {
  float most = -std::numeric_limits<float>::infinity(), sum = 0.f;
  for (int32_t i = 0; i < p.top_k; ++i) most = std::max(most, logits[experts[i]]);
  for (int32_t i = 0; i < p.top_k; ++i) {
    if (p.weight == MoeWeight::kSoftmaxOfChosen) weights[i] = std::exp(logits[experts[i]] - most);
    if (p.weight == MoeWeight::kSigmoidOfLogit) weights[i] = Sigmoid(logits[experts[i]]);
    sum += weights[i];
  }
  for (int32_t i = 0; i < p.top_k; ++i) {
    if (p.weight == MoeWeight::kNormalized) weights[i] = weights[i] / (sum + MOE_ROUTE_EPSILON) * p.factor;
    if (p.weight == MoeWeight::kSoftmaxOfChosen) weights[i] /= sum;
  }
}

inline void RouteToken(const MoeRouteParams& p, int64_t token) {
  float logits[MOE_ROUTE_MAX_EXPERTS], scores[MOE_ROUTE_MAX_EXPERTS], keys[MOE_ROUTE_MAX_EXPERTS];
  bool taken[MOE_ROUTE_MAX_EXPERTS] = {};
  float most = -std::numeric_limits<float>::infinity(), sum = 0.f;
  for (int32_t i = 0; i < p.num_experts; ++i) {
    logits[i] = NumberAt(p.logits, token * p.logit_stride + i);
    most = std::max(most, logits[i]);
  }
  for (int32_t i = 0; i < p.num_experts; ++i) {
    scores[i] = logits[i];
    if (p.score == MoeScore::kSigmoid) scores[i] = Sigmoid(logits[i]);
    if (p.score == MoeScore::kSoftmax) sum += scores[i] = std::exp(logits[i] - most);
  }
  for (int32_t i = 0; i < p.num_experts; ++i) {
    if (p.score == MoeScore::kSoftmax) scores[i] /= sum;
    keys[i] = scores[i] + (p.bias.data == nullptr ? 0.f : NumberAt(p.bias, i));
  }
  if (p.groups > 1) KeepGroups(p, keys, taken);
  float weights[MOE_ROUTE_MAX_TOP_K];
  int32_t* const experts = p.experts + token * p.top_k;
  for (int32_t i = 0; i < p.top_k; ++i) {
    experts[i] = Largest(keys, taken, 0, p.num_experts);
    taken[experts[i]] = true;
    weights[i] = scores[experts[i]];
    if (p.replay != nullptr) p.replay[token * p.top_k + i] = int16_t(experts[i]);
  }
  WeighChosen(p, logits, weights, experts);
  for (int32_t i = 0; i < p.top_k; ++i) SetNumber(p.weights, token * p.top_k + i, weights[i]);
}

}  // namespace cpu

inline Status MoeRoute(const MoeRouteParams& p, Stream) {
  cpu::ParallelFor(p.tokens, int64_t(p.num_experts) * p.top_k, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) cpu::RouteToken(p, token);
  });
  return 0;
}

inline Status HashTopK(const HashTopKParams& p, Stream) {
  const int32_t slots = p.top_k + p.shared;
  for (int64_t token = 0; token < p.tokens; ++token) {
    float* const weights = p.weights + token * slots;
    int32_t* const experts = p.experts + token * slots;
    float sum = 0.f;
    for (int32_t i = 0; i < p.top_k; ++i) {
      experts[i] = p.table[p.input_ids[token] * p.top_k + i];
      const float x = p.logits[token * p.num_experts + experts[i]];
      sum += weights[i] = std::sqrt(std::max(x, 0.f) + std::log1p(std::exp(-std::fabs(x))));
    }
    for (int32_t i = 0; i < p.top_k; ++i) weights[i] /= sum;
    if (p.shared > 0) {
      experts[p.top_k] = p.num_experts;
      weights[p.top_k] = 1.f / p.factor;
    }
  }
  return 0;
}

}  // namespace flashinfer
