// SPDX-License-Identifier: Apache-2.0
// The step kernel of test_emulated_step.py: parameters from tensors of bf16 tokens, [batch, token, head, channel].
#include <flashinfer/recurrent/k_major.cuh>
#include <flashinfer/recurrent/step.cuh>

using namespace flashinfer;
using namespace flashinfer::recurrent;

struct Sizes {
  int64_t batch, tokens, key_heads, value_heads, key_dim, value_dim;
};

StepParams Make(const Sizes& s, void* out, void* q, void* k, void* v, void* a, void* b, float* a_log, float* dt_bias,
                void* state, int32_t* slots) {
  StepParams p{};
  p.sequences = s.batch, p.tokens = s.tokens, p.key_heads = s.key_heads, p.value_heads = s.value_heads;
  p.key_dim = s.key_dim, p.value_dim = s.value_dim;
  p.q = q, p.k = k, p.v = v, p.out = out, p.out_type = ElementType::kFloat;
  p.q_stride = p.k_stride = {s.tokens * s.key_heads * s.key_dim, s.key_heads * s.key_dim, s.key_dim};
  p.key_group = FastDivisor(uint32_t(s.value_heads / s.key_heads));
  p.v_stride = p.out_stride = {s.tokens * s.value_heads * s.value_dim, s.value_heads * s.value_dim, s.value_dim};
  p.b = {b, {s.tokens * s.value_heads, s.value_heads, 1}, ElementType::kBfloat};
  p.a = {a, p.b.stride, ElementType::kBfloat};
  p.g = a;
  p.g_stride = {s.tokens * s.value_heads * s.key_dim, s.value_heads * s.key_dim, s.key_dim};
  p.a_log = a_log, p.beta_is_logit = p.normalise = p.zero_skipped = true;
  p.scale = 0.5f, p.softplus_beta = 1.f, p.softplus_threshold = 20.f;
  p.gate = KimiDeltaRule::Gate::kBounded, p.lower_bound = -5.f;
  p.initial = {state, s.value_heads * s.value_dim * s.key_dim, 0, s.value_dim * s.key_dim, s.key_dim, {}};
  if (slots != nullptr) p.initial.slots = {slots, 1, 0, false};
  p.final = p.initial;
  p.is_vectorised = true;
  (void)dt_bias;
  return p;
}

/// `each`: states after every token, or null. `is_any`: the kernel for everything, without vectors.
EMULATION_EXPORT int gdn(const Sizes* s, void* out, void* q, void* k, void* v, void* a, void* b, float* a_log,
                         float* dt_bias, void* state, int32_t* slots, void* each, int64_t is_bf16, int64_t is_any) {
  StepParams p = Make(*s, out, q, k, v, a, b, a_log, dt_bias, state, slots);
  p.dt_bias = {dt_bias, {0, 0, 1}, ElementType::kFloat};
  p.is_vectorised = is_any == 0;
  const int64_t size = s->value_heads * s->value_dim * s->key_dim;
  if (each != nullptr) p.each = {each, s->tokens * size, size, s->value_dim * s->key_dim, s->key_dim, {}};
  return int(is_bf16 != 0 ? Step<GatedDeltaRule, bfloat16_t, bfloat16_t>(p, nullptr)
                          : Step<GatedDeltaRule, bfloat16_t, float>(p, nullptr));
}

int RunKda(const Sizes* s, KimiDeltaRule::Gate gate, void* out, void* q, void* k, void* v, void* g, void* b,
           float* a_log, float* dt_bias, void* state, int32_t* slots, int64_t is_bf16, int64_t is_any) {
  StepParams p = Make(*s, out, q, k, v, g, b, a_log, dt_bias, state, slots);
  p.gate = gate;
  p.dt_bias = {dt_bias, {0, 0, s->key_dim}, ElementType::kFloat};
  p.is_vectorised = is_any == 0;
  return int(is_bf16 != 0 ? Step<KimiDeltaRule, bfloat16_t, bfloat16_t>(p, nullptr)
                          : Step<KimiDeltaRule, bfloat16_t, float>(p, nullptr));
}

EMULATION_EXPORT int kda(const Sizes* s, void* out, void* q, void* k, void* v, void* g, void* b, float* a_log,
                         float* dt_bias, void* state, int32_t* slots, void*, int64_t is_bf16, int64_t is_any) {
  constexpr auto GATE = KimiDeltaRule::Gate::kBounded;
  return RunKda(s, GATE, out, q, k, v, g, b, a_log, dt_bias, state, slots, is_bf16, is_any);
}

EMULATION_EXPORT int kda_softplus(const Sizes* s, void* out, void* q, void* k, void* v, void* g, void* b, float* a_log,
                                  float* dt_bias, void* state, int32_t* slots, void*, int64_t is_bf16, int64_t is_any) {
  constexpr auto GATE = KimiDeltaRule::Gate::kSoftplus;
  return RunKda(s, GATE, out, q, k, v, g, b, a_log, dt_bias, state, slots, is_bf16, is_any);
}

EMULATION_EXPORT int k_major(const Sizes* s, void* out, void* q, void* k, void* v, void* a, void* b, float* a_log,
                             float* dt_bias, void* state, int32_t*, void*, int64_t, int64_t is_any) {
  StepParams p = Make(*s, out, q, k, v, a, b, a_log, dt_bias, state, nullptr);
  p.dt_bias = {dt_bias, {0, 0, 1}, ElementType::kFloat};
  p.is_vectorised = is_any == 0;
  p.initial.row = s->value_dim;
  return int(KMajorStep<bfloat16_t>(p, nullptr));
}
