// SPDX-License-Identifier: Apache-2.0
// Launchers of routing: argument checks, stream.
#include <algorithm>
#include <string>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/moe/route.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/moe/cpu/route.h>
#elif defined(__CUDACC__)
#include <flashinfer/moe/route.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

MoeNumbers Numbers(const TensorView& t) {
  const MoeFloat half = t.dtype().code == kDLBfloat ? MoeFloat::kBfloat : MoeFloat::kHalf;
  return {t.data_ptr(), t.dtype().bits == 32 ? MoeFloat::kFloat : half};
}

void CheckRange(const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must be from " << low << " to " << high << ", got "
                                    << value;
  }
}

}  // namespace

/// `score` and `weight` are numbers of MoeScore and MoeWeight. Errors name the arguments of fused_topk_deepseek if
/// `is_deepseek`, else those of route_tokens.
void moe_route(TensorView weights, TensorView experts, Optional<TensorView> replay, TensorView logits,
               Optional<TensorView> bias, int64_t groups, int64_t top_groups, int64_t score, int64_t weight,
               double factor, bool enable_pdl, bool is_deepseek, int64_t block_tokens) {
  const char* op = is_deepseek ? "fused_topk_deepseek" : "route_tokens";
  const char* of_logits = is_deepseek ? "scores" : "logits";
  const char* of_weights = is_deepseek ? "topk_values" : "weights";
  const char* of_experts = is_deepseek ? "topk_indices" : "experts";
  const std::string rows = std::string(of_logits) + ".shape[0]", columns = std::string(of_logits) + ".shape[1]";
  Expect(op, of_logits, logits).on_device().rank(2).dtype({dl_float32, dl_float16, dl_bfloat16}).last_dim_contiguous();
  const int64_t tokens = logits.size(0), num_experts = logits.size(1);
  Expect(op, of_experts, experts).same_device(logits, of_logits).rank(2).dtype({dl_int32}).contiguous();
  Expect(op, of_experts, experts).dim(0, tokens, rows.c_str());
  Expect(op, of_weights, weights).same_device(logits, of_logits).rank(2).same_shape(experts, of_experts).contiguous();
  Expect(op, of_weights, weights).dtype({dl_float32, dl_float16, dl_bfloat16});
  CheckRange(op, "number of experts", num_experts, 1, MOE_ROUTE_MAX_EXPERTS);
  const int64_t most = std::min<int64_t>(MOE_ROUTE_MAX_TOP_K, num_experts);
  const char* of_k = is_deepseek ? "topk" : "top_k";
  CheckRange(op, of_k, experts.size(1), 1, most);
  CheckRange(op, "n_group", groups, 1, std::min<int64_t>(MOE_ROUTE_MAX_GROUPS, num_experts));
  CheckRange(op, "topk_group", top_groups, 1, groups);
  CheckRange(op, "score", score, 0, 2);
  CheckRange(op, "weight", weight, 0, 3);
  CheckRange(op, "block_tokens", block_tokens, 1, MOE_ROUTE_MAX_BLOCK_TOKENS);
  if (num_experts % groups != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": n_group must divide the number of experts, " << num_experts << ", got "
                                    << groups;
  }
  const int64_t choice = top_groups * (num_experts / groups);
  if (experts.size(1) > choice) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << of_k
                                    << " must be at most topk_group * (experts / n_group) = " << choice << ", got "
                                    << experts.size(1);
  }
  MoeRouteParams p{};
  p.logits = Numbers(logits);
  p.logit_stride = logits.stride(0);
  if (bias.has_value()) {
    Expect(op, "bias", bias.value()).same_device(logits, of_logits).rank(1).dim(0, num_experts, columns.c_str());
    Expect(op, "bias", bias.value()).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
    p.bias = Numbers(bias.value());
  }
  if (replay.has_value()) {
    const Expect expected(op, "routing_replay_out", replay.value());
    expected.same_device(logits, of_logits).dtype({DLDataType{kDLInt, 16, 1}}).contiguous();
    expected.rank(2).dim(1, experts.size(1), "topk");
    CheckRange(op, "rows of routing_replay_out", replay.value().size(0), tokens, INT64_MAX);
    p.replay = replay.value().data_ptr<int16_t>();
  }
  p.weights = Numbers(weights);
  p.experts = experts.data_ptr<int32_t>();
  p.tokens = tokens;
  p.num_experts = int32_t(num_experts);
  p.top_k = int32_t(experts.size(1));
  p.groups = int32_t(groups);
  p.top_groups = int32_t(top_groups);
  p.score = MoeScore(score);
  p.weight = MoeWeight(weight);
  p.factor = float(factor);
  p.enable_pdl = UsePdl(enable_pdl, logits.device());
  p.block_tokens = int32_t(block_tokens);
  DeviceGuard guard(logits.device());
  CheckStatus(op, MoeRoute(p, get_stream(logits.device())));
}

void hash_topk(TensorView weights, TensorView experts, TensorView router_logits, TensorView input_ids,
               TensorView tid2eid, double factor, bool enable_pdl) {
  const char* op = "hash_topk";
  Expect(op, "router_logits", router_logits).on_device().rank(2).dtype({dl_float32}).contiguous();
  Expect(op, "input_ids", input_ids).same_device(router_logits, "router_logits").rank(1).dtype({dl_int64}).contiguous();
  Expect(op, "input_ids", input_ids).dim(0, router_logits.size(0), "router_logits.shape[0]");
  Expect(op, "tid2eid", tid2eid).same_device(router_logits, "router_logits").rank(2).dtype({dl_int32}).contiguous();
  Expect(op, "weights", weights).same_device(router_logits, "router_logits").dtype({dl_float32}).contiguous();
  Expect(op, "experts", experts).same_device(router_logits, "router_logits").dtype({dl_int32}).contiguous();
  const int64_t top_k = tid2eid.size(1), slots = weights.size(1);
  CheckRange(op, "top_k", top_k, 1, MOE_ROUTE_MAX_TOP_K);
  CheckRange(op, "slots", slots, top_k, std::min<int64_t>(top_k + 1, MOE_ROUTE_MAX_TOP_K));
  const HashTopKParams p{router_logits.data_ptr<float>(),
                         input_ids.data_ptr<int64_t>(),
                         tid2eid.data_ptr<int32_t>(),
                         weights.data_ptr<float>(),
                         experts.data_ptr<int32_t>(),
                         router_logits.size(0),
                         tid2eid.size(0),
                         int32_t(router_logits.size(1)),
                         int32_t(top_k),
                         int32_t(slots - top_k),
                         float(factor),
                         UsePdl(enable_pdl, router_logits.device())};
#ifdef FLASHINFER_CPU  // a check on the GPU would have to synchronise
  for (int64_t token = 0; token < p.tokens; ++token) {
    CheckRange(op, "input_ids", p.input_ids[token], 0, p.vocabulary - 1);
    for (int64_t i = 0; i < top_k; ++i) {
      CheckRange(op, "tid2eid", p.table[p.input_ids[token] * top_k + i], 0, p.num_experts - 1);
    }
  }
#endif
  DeviceGuard guard(router_logits.device());
  CheckStatus(op, HashTopK(p, get_stream(router_logits.device())));
}
