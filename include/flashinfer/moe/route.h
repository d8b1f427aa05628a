// SPDX-License-Identifier: Apache-2.0
// Routing of a mixture-of-experts layer: the experts of each token and their weights, from router logits or from a
// table. Parameters and entries, shared by both backends; arithmetic is fp32.
//   MoeRoute   the k experts with the largest scores, those of few groups if there are groups
//   HashTopK   the experts that a table has for the token's number
// Ties go to the expert with the smaller number. NaN is smaller than any number.
// Defined in route.cuh (CUDA) and cpu/route.h (CPU).
//   test  pytest tests/fused_moe/test_moe_routing.py      bench  python benchmarks/bench_moe_routing.py
#pragma once
#include <cstdint>

#include "../backend.h"

namespace flashinfer {

/// Score by which experts are compared. A bias is added for the comparison only.
enum class MoeScore : int32_t { kLogit = 0, kSoftmax = 1, kSigmoid = 2 };

/// Weight of a chosen expert.
enum class MoeWeight : int32_t {
  kScore = 0,            ///< the score
  kNormalized = 1,       ///< score / (sum over the chosen + 1e-20) * factor
  kSoftmaxOfChosen = 2,  ///< softmax of the logits over the chosen
  kSigmoidOfLogit = 3,   ///< sigmoid(logit)
};

enum class MoeFloat : int32_t { kFloat = 0, kHalf = 1, kBfloat = 2 };

/// A row of numbers whose type is known at run time: one kernel serves all combinations of types.
struct MoeNumbers {
  void* data;
  MoeFloat type;
};

struct MoeRouteParams {
  MoeNumbers logits;  ///< (tokens, num_experts)
  int64_t logit_stride;
  MoeNumbers bias;     ///< (num_experts,); data is null if there is none
  MoeNumbers weights;  ///< (tokens, top_k)
  int32_t* experts;    ///< (tokens, top_k), by descending score
  int16_t* replay;     ///< (tokens, top_k) the same experts; or null
  int64_t tokens;
  int32_t num_experts;  ///< 1 to MOE_ROUTE_MAX_EXPERTS
  int32_t top_k;        ///< 1 to MOE_ROUTE_MAX_TOP_K, at most the experts of top_groups groups
  int32_t groups;       ///< groups of neighbouring experts, 1 to MOE_ROUTE_MAX_GROUPS; divides num_experts
  int32_t top_groups;   ///< groups that experts are chosen from: those whose two best experts have the largest sum
  MoeScore score;
  MoeWeight weight;
  float factor = 1.f;
  bool enable_pdl = false;
  int32_t block_tokens = 4;  ///< CUDA: tokens of a block, one warp each: 1 to MOE_ROUTE_MAX_BLOCK_TOKENS
};

constexpr int32_t MOE_ROUTE_MAX_BLOCK_TOKENS = 4;
constexpr int32_t MOE_ROUTE_MAX_EXPERTS = 1024;
constexpr int32_t MOE_ROUTE_MAX_TOP_K = 32;
constexpr int32_t MOE_ROUTE_MAX_GROUPS = 32;
constexpr float MOE_ROUTE_EPSILON = 1e-20f;

Status MoeRoute(const MoeRouteParams& params, Stream stream);

struct HashTopKParams {
  const float* logits;       ///< (tokens, num_experts)
  const int64_t* input_ids;  ///< (tokens,) numbers in the vocabulary. CUDA: one that is not gets experts -1, weight 0
  const int32_t* table;      ///< (vocabulary, top_k) experts. CUDA: a number that is none gets expert -1 and weight 0
  float* weights;            ///< (tokens, top_k + shared): sqrt(softplus(logit)) / sum over top_k; shared: 1 / factor
  int32_t* experts;          ///< (tokens, top_k + shared): from the table; shared: num_experts
  int64_t tokens, vocabulary;
  int32_t num_experts, top_k;
  int32_t shared;  ///< 0 or 1; top_k + shared is at most MOE_ROUTE_MAX_TOP_K
  float factor;
  bool enable_pdl = false;
};

Status HashTopK(const HashTopKParams& params, Stream stream);

}  // namespace flashinfer
