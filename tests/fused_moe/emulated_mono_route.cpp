// SPDX-License-Identifier: Apache-2.0
// Routing, and a layer of experts that routes its token, on the CPU; called by test_emulated_mono_route.py.
#include <flashinfer/moe/mono/fp8_few.cuh>
#include <flashinfer/moe/mono/fp8_one.cuh>
#include <flashinfer/moe/route.cuh>

using namespace flashinfer;
using namespace flashinfer::fused_moe;

/// Route tokens by bf16 logits with the kernel of moe/route.cuh.
EMULATION_EXPORT int route(void* logits, int64_t stride, int64_t tokens, int64_t num_experts, int64_t top_k,
                           int64_t score, int64_t weight, int32_t* experts, float* weights, int64_t groups,
                           int64_t top_groups) {
  MoeRouteParams p{};
  p.logits = {logits, MoeFloat::kBfloat}, p.logit_stride = stride;
  p.weights = {weights, MoeFloat::kFloat}, p.experts = experts;
  p.tokens = tokens, p.num_experts = int32_t(num_experts), p.top_k = int32_t(top_k), p.groups = int32_t(groups);
  p.top_groups = int32_t(top_groups), p.score = MoeScore(score), p.weight = MoeWeight(weight);
  return int(MoeRoute(p, nullptr));
}

/// Compute a layer of one bf16 token and e4m3 blocks on three SMs; without logits, of one that is routed. `x` has the fields in
/// the order below.
EMULATION_EXPORT int layer(const int64_t* x) {
  const auto number = [&] { return int32_t(*x++); };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  MonoParams p{};
  p.tokens = number(), p.top_k = number(), p.num_experts = number(), p.hidden = number(), p.intermediate = number();
  p.input = pointer(), p.input_stride = p.hidden;
  p.fc1 = pointer(), p.fc2 = pointer(), p.fc1_scales = pointer(), p.fc2_scales = pointer();
  p.hidden_values = pointer(), p.output = pointer(), p.output_stride = p.hidden;
  p.element = p.output_element = Element::kBFloat16;
  p.activation.type = ActivationType::kSwiglu;
  p.experts = static_cast<const int32_t*>(pointer()), p.scales = static_cast<const float*>(pointer());
  p.routing.logits = pointer(), p.routing.logit_stride = *x++;
  p.routing.score = MoeScore(number()), p.routing.weight = MoeWeight(number());
  emulation::device.multiprocessors = 3;
  return int(MonoFp8Block(p, nullptr));
}
