// SPDX-License-Identifier: Apache-2.0
// Launchers of the gated delta rule token by token: decode, verification of drafts, replay of accepted ones, rings.
#include "recurrent_step.h"
// clang-format off
#include <flashinfer/recurrent/k_major.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/k_major.h>
#include <flashinfer/recurrent/cpu/step.h>
#elif defined(__CUDACC__)
#include <flashinfer/recurrent/k_major.cuh>
#include <flashinfer/recurrent/step.cuh>
#endif
// clang-format on

using namespace recurrent_step;  // NOLINT(*)
using flashinfer::recurrent::GatedDeltaRule;
using flashinfer::recurrent::GateForm;

namespace {

#ifdef FLASHINFER_CPU
constexpr bool IS_CPU = true;
#else
constexpr bool IS_CPU = false;
#endif

/// The published functions that these launchers serve, for texts of errors.
const char* NameOf(int64_t function) {
  constexpr const char* NAMES[] = {"gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp", "gated_delta_rule"};
  return NAMES[function];
}

void Run(const char* op, StepParams& p, DLDataType tokens, DLDataType state, DLDevice device) {
  p.is_vectorised = IsVectorised(p, state.bits / 8);
  p.enable_pdl = UsePdl(true, device);
  DeviceGuard guard(device);
#ifdef FLASHINFER_CPU
  if (tokens.bits == 32) return RunOf<GatedDeltaRule, float>(op, p, state, get_stream(device));
#endif
  if (tokens.code == kDLBfloat) {
    RunOf<GatedDeltaRule, flashinfer::bfloat16_t>(op, p, state, get_stream(device));
  } else {
    RunOf<GatedDeltaRule, flashinfer::float16_t>(op, p, state, get_stream(device));
  }
}

void CheckDims(const char* op, const StepParams& p, DLDataType state) {
  const bool is_float = state.bits == 32;
  if (p.key_dim != 128 && !(is_float && p.key_dim == 256)) {
    FLASHINFER_THROW(ArgumentError) << op << ": q.shape[3] must be 128" << (is_float ? " or 256" : "")
                                    << " (the kernels for states of " << state << "), got " << p.key_dim;
  }
  if (p.value_dim % 8 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": v.shape[3] must be a multiple of 8, got " << p.value_dim;
  }
}

/// Check the gates of the projections and write them to the parameters.
void SetGates(const char* op, StepParams& p, const TensorView& a_log, const TensorView& a, const TensorView& dt_bias,
              const TensorView& b, const TensorView& v) {
  Expect(op, "A_log", a_log).same_device(v, "v").dtype({dl_float32}).rank(1).dim(0, p.value_heads, "v.shape[2]");
  Expect(op, "A_log", a_log).contiguous();
  Expect(op, "dt_bias", dt_bias)
      .same_device(v, "v")
      .dtype({dl_float32, dl_bfloat16, dl_float16})
      .rank(1)
      .dim(0, p.value_heads, "v.shape[2]");
  p.a_log = a_log.data_ptr<float>();
  p.a = GateOf(op, "a", p, a, v), p.b = GateOf(op, "b", p, b, v);
  p.dt_bias = HeadNumbersOf(dt_bias);
  p.form = GateForm::kProjections, p.beta_is_logit = true;
}

float ScaleOf(double scale, int64_t key_dim) {
  return std::isnan(scale) ? 1.f / std::sqrt(float(key_dim)) : float(scale);
}

}  // namespace

/// One call of decode: `state` is a pool if there are read slots, else one state for each sequence. `scale` NaN: the
/// default. Without write slots the state goes back where it came from.
void gdn_decode(TensorView out, TensorView q, TensorView k, TensorView v, TensorView state, TensorView a_log,
                TensorView a, TensorView dt_bias, TensorView b, OptionalView read, OptionalView write, double scale,
                double softplus_beta, double softplus_threshold, bool normalise, int64_t function) {
  const char* op = NameOf(function);
  const char* state_name = function == 2 ? "initial_state_source" : read.has_value() ? "initial_state" : "state";
  StepParams p{};
  SetTokens(op, p, q, k, v, IS_CPU && function == 0);  // models are compared in float32
  SetOutput(op, p, out, "output", v);
  SetGates(op, p, a_log, a, dt_bias, b, v);
  Expect(op, state_name, state).dtype({dl_float32, dl_bfloat16});
  CheckDims(op, p, state.dtype());
  p.initial = StatesOf(op, state_name, p, state, q);
  if (read.has_value()) {
    const int64_t slots = state.size(0);
    p.initial.slots = IndicesOf(op, "initial_state_indices", read.value(), q, 1, p.sequences, "q.shape[0]", slots);
  } else {
    Expect(op, state_name, state).dim(0, p.sequences, "q.shape[0]");
  }
  p.final = p.initial;
  if (write.has_value()) {
    const int64_t slots = state.size(0);
    p.final.slots = IndicesOf(op, "output_state_indices", write.value(), q, 1, p.sequences, "q.shape[0]", slots);
  }
  p.scale = ScaleOf(scale, p.key_dim);
  p.softplus_beta = float(softplus_beta), p.softplus_threshold = float(softplus_threshold);
  p.normalise = normalise, p.zero_skipped = true;
  Run(op, p, q.dtype(), state.dtype(), q.device());
}

/// Several tokens of each sequence. `each`: states after every token, [batch, tokens, ...] or the pool with `each_slots`
/// [batch, tokens]. `rawv`, `rawk`, `log_decays`, `betas`: windows of a replay, by read slot.
void gdn_verify(OptionalView out, TensorView q, TensorView k, TensorView v, TensorView state, TensorView a_log,
                TensorView a, TensorView dt_bias, TensorView b, OptionalView read, OptionalView write,
                OptionalView buffer, OptionalView each_slots, OptionalView boundaries, int64_t recover,
                bool writes_final, double scale, double softplus_beta, double softplus_threshold, bool normalise,
                bool zero_skipped, OptionalView rawv, OptionalView rawk, OptionalView log_decays, OptionalView betas,
                int64_t function) {
  const char* op = NameOf(function);
  const char* state_name = "initial_state";
  StepParams p{};
  SetTokens(op, p, q, k, v);
  if (out.has_value()) SetOutput(op, p, out.value(), "output", v);
  SetGates(op, p, a_log, a, dt_bias, b, v);
  Expect(op, state_name, state).dtype({dl_float32, dl_bfloat16});
  CheckDims(op, p, state.dtype());
  const int64_t slots = state.size(0);
  p.initial = StatesOf(op, state_name, p, state, q);
  if (read.has_value()) {
    p.initial.slots = IndicesOf(op, "initial_state_indices", read.value(), q, 1, p.sequences, "q.shape[0]", slots);
  } else {
    Expect(op, state_name, state).dim(0, p.sequences, "q.shape[0]");
  }
  if (writes_final) {
    p.final = p.initial;
    if (write.has_value()) {
      p.final.slots = IndicesOf(op, "output_state_indices", write.value(), q, 1, p.sequences, "q.shape[0]", slots);
    }
  }
  if (each_slots.has_value()) {
    Expect(op, "ssm_state_indices", each_slots.value()).rank(2).dim(1, p.tokens, "q.shape[1]");
    p.each = p.initial;
    p.each.slots = IndicesOf(op, "ssm_state_indices", each_slots.value(), q, 2, p.sequences, "q.shape[0]", slots);
  } else if (buffer.has_value()) {
    const TensorView& t = buffer.value();
    Expect(op, "intermediate_states_buffer", t)
        .same_device(q, "q")
        .same_dtype(state, state_name)
        .rank(5)
        .dim(2, p.value_heads, "v.shape[2]")
        .dim(3, p.value_dim, "v.shape[3]")
        .dim(4, p.key_dim, "q.shape[3]")
        .last_dim_contiguous();
    if (t.size(0) < p.sequences || t.size(1) < p.tokens) {
      FLASHINFER_THROW(ArgumentError) << op << ": intermediate_states_buffer must have at least " << p.sequences
                                      << " sequences of " << p.tokens << " tokens, got " << t.size(0) << " of "
                                      << t.size(1);
    }
    p.each = {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3), {}};
  }
  if (boundaries.has_value()) {
    p.boundaries = IndicesOf(op, "accepted_steps", boundaries.value(), q, 1, p.sequences, "q.shape[0]");
  }
  p.recover = recover;
  if (rawv.has_value()) {
    const auto window = [&](const char* name, const TensorView& t, int rank, int64_t heads, int64_t width, auto dtype) {
      Expect(op, name, t).same_device(q, "q").dtype({dtype}).rank(rank).dim(0, slots, "slots of initial_state");
      Expect(op, name, t).dim(1, heads, "heads").dim(2, p.tokens, "q.shape[1]").contiguous();
      if (rank == 4) Expect(op, name, t).dim(3, width, "the head dimension");
      return t.stride(0);
    };
    auto& r = p.record;
    r.value_slot = window("replayssm_rawv", rawv.value(), 4, p.value_heads, p.value_dim, dl_bfloat16);
    r.key_slot = window("replayssm_rawk", rawk.value(), 4, p.key_heads, p.key_dim, dl_bfloat16);
    r.number_slot = window("replayssm_g", log_decays.value(), 3, p.value_heads, 0, dl_float32);
    window("replayssm_beta", betas.value(), 3, p.value_heads, 0, dl_float32);
    r.values = rawv.value().data_ptr(), r.keys = rawk.value().data_ptr();
    r.log_decays = log_decays.value().data_ptr<float>(), r.betas = betas.value().data_ptr<float>();
  }
  p.scale = ScaleOf(scale, p.key_dim);
  p.softplus_beta = float(softplus_beta), p.softplus_threshold = float(softplus_threshold);
  p.normalise = normalise, p.zero_skipped = zero_skipped;
  Run(op, p, q.dtype(), state.dtype(), q.device());
}

/// Advance the states of one layer by the accepted prefix of a window: states [slots, heads, V, K] of any type.
void gdn_replay(TensorView state, TensorView rawv, TensorView rawk, TensorView log_decays, TensorView betas,
                TensorView read, TensorView lengths, OptionalView write, bool normalise) {
  const char* op = "gated_delta_rule_replayssm_commit";
  StepParams p{};
  // Windows are [slots, head, token, ...]: as tensors of tokens, heads come before tokens.
  Expect(op, "rawk_cache", rawk).on_device().rank(4).dtype({dl_bfloat16}).last_dim_contiguous();
  Expect(op, "rawv_cache", rawv).same_device(rawk, "rawk_cache").rank(4).dtype({dl_bfloat16}).last_dim_contiguous();
  p.sequences = read.size(0), p.tokens = rawk.size(2);
  p.key_heads = rawk.size(1), p.value_heads = rawv.size(1), p.key_dim = rawk.size(3), p.value_dim = rawv.size(3);
  if (p.key_heads == 0 || p.value_heads % p.key_heads != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": rawv_cache.shape[1] must be a multiple of rawk_cache.shape[1], got "
                                    << p.value_heads << " and " << p.key_heads;
  }
  p.key_group = flashinfer::FastDivisor(uint32_t(p.value_heads / p.key_heads));
  Expect(op, "rawv_cache", rawv).dim(2, p.tokens, "rawk_cache.shape[2]");
  for (auto [name, t] : {std::pair{"g_cache", &log_decays}, std::pair{"beta_cache", &betas}}) {
    Expect(op, name, *t).same_device(rawk, "rawk_cache").dtype({dl_float32}).rank(3);
    Expect(op, name, *t).dim(1, p.value_heads, "rawv_cache.shape[1]").dim(2, p.tokens, "rawk_cache.shape[2]");
  }
  Expect(op, "checkpoint_state", state).dtype({dl_float32, dl_bfloat16});
  CheckDims(op, p, state.dtype());
  p.initial = StatesOf(op, "checkpoint_state", p, state, rawk);
  const int64_t slots = state.size(0);
  p.initial.slots = IndicesOf(op, "state_indices", read, rawk, 1, p.sequences, "state_indices.shape[0]", slots);
  p.final = p.initial;
  if (write.has_value()) {
    p.final.slots =
        IndicesOf(op, "track_state_indices", write.value(), rawk, 1, p.sequences, "state_indices.shape[0]", slots);
  }
  p.boundaries = IndicesOf(op, "accept_lens", lengths, rawk, 1, p.sequences, "state_indices.shape[0]");
  p.k = rawk.data_ptr(), p.v = rawv.data_ptr();
  const auto strides = [](const TensorView& t) { return TokenStrides{t.stride(0), t.stride(2), t.stride(1)}; };
  p.k_stride = strides(rawk), p.v_stride = strides(rawv);
  p.a = {log_decays.data_ptr(), strides(log_decays), ElementType::kFloat};
  p.b = {betas.data_ptr(), strides(betas), ElementType::kFloat};
  p.form = GateForm::kGiven, p.beta_is_logit = false, p.normalise = normalise, p.scale = 1.f;
  p.is_replay = true;
  Run(op, p, dl_bfloat16, state.dtype(), rawk.device());
}

/// Tokens after a ring (recurrent/step.h). `flush_at` above the ring's length: the state is only read.
void gdn_ring(OptionalView out, TensorView q, TensorView k, TensorView v, TensorView state, TensorView a_log,
              TensorView a, TensorView dt_bias, TensorView b, TensorView read, TensorView ring_k, TensorView ring_u,
              TensorView ring_g, TensorView lengths, OptionalView bases, int64_t flush_at, bool writes_final,
              double scale, double softplus_beta, double softplus_threshold, bool normalise, bool zero_skipped) {
  const char* op = writes_final ? "gated_delta_rule_mtp_ucache_flush" : "gated_delta_rule_mtp_ucache";
  StepParams p{};
  SetTokens(op, p, q, k, v);
  if (out.has_value()) SetOutput(op, p, out.value(), "output", v);
  SetGates(op, p, a_log, a, dt_bias, b, v);
  Expect(op, "initial_state_source", state).dtype({dl_bfloat16, dl_float16});
  CheckDims(op, p, state.dtype());
  const int64_t slots = state.size(0);
  p.initial = StatesOf(op, "initial_state_source", p, state, q);
  p.initial.slots = IndicesOf(op, "initial_state_indices", read, q, 1, p.sequences, "q.shape[0]", slots);
  if (writes_final) p.final = p.initial;
  auto& r = p.ring;
  Expect(op, "k_cache", ring_k).same_device(q, "q").dtype({dl_bfloat16, dl_float16}).rank(4);
  Expect(op, "k_cache", ring_k).dim(0, slots, "initial_state_source.shape[0]").dim(1, p.key_heads, "q.shape[2]");
  Expect(op, "k_cache", ring_k).dim(3, p.key_dim, "q.shape[3]").contiguous();
  r.rows = ring_k.size(2);
  Expect(op, "u_cache", ring_u).same_device(q, "q").same_dtype(ring_k, "k_cache").rank(4);
  Expect(op, "u_cache", ring_u).dim(0, slots, "initial_state_source.shape[0]").dim(1, p.value_heads, "v.shape[2]");
  Expect(op, "u_cache", ring_u).dim(2, r.rows, "k_cache.shape[2]").dim(3, p.value_dim, "v.shape[3]").contiguous();
  Expect(op, "g_cache", ring_g).same_device(q, "q").dtype({dl_float32}).rank(3);
  Expect(op, "g_cache", ring_g).dim(0, slots, "initial_state_source.shape[0]").dim(1, p.value_heads, "v.shape[2]");
  Expect(op, "g_cache", ring_g).dim(2, r.rows, "k_cache.shape[2]").contiguous();
  r.k = ring_k.data_ptr(), r.u = ring_u.data_ptr(), r.g = ring_g.data_ptr<float>();
  r.k_slot = ring_k.stride(0), r.u_slot = ring_u.stride(0), r.g_slot = ring_g.stride(0);
  r.type = TypeOf(ring_k), r.flush_at = flush_at;
  r.lengths = IndicesOf(op, "hist_len", lengths, q, 1, p.sequences, "q.shape[0]", r.rows - p.tokens + 1);
  if (bases.has_value()) {
    r.bases = IndicesOf(op, "cache_base", bases.value(), q, 1, p.sequences, "q.shape[0]", r.rows);
  }
  p.scale = ScaleOf(scale, p.key_dim);
  p.softplus_beta = float(softplus_beta), p.softplus_threshold = float(softplus_threshold);
  p.normalise = normalise, p.zero_skipped = zero_skipped;
  Run(op, p, q.dtype(), state.dtype(), q.device());
}

/// One token of each sequence with states [batch, value heads, K, V], V contiguous, fp32.
void gdn_decode_k_major(TensorView out, TensorView q, TensorView k, TensorView v, TensorView state, TensorView a_log,
                        TensorView a, TensorView dt_bias, TensorView b, double scale, bool normalise) {
  const char* op = "gated_delta_rule_decode";
  StepParams p{};
  SetTokens(op, p, q, k, v);
  SetOutput(op, p, out, "output", v);
  SetGates(op, p, a_log, a, dt_bias, b, v);
  if (p.tokens != 1) {
    FLASHINFER_THROW(ArgumentError) << op << ": q.shape[1] must be 1 (T = 1, one token of each sequence), got "
                                    << p.tokens;
  }
  if (p.key_dim % 64 != 0 || p.key_dim > 256 || p.value_dim % 32 != 0) {
    FLASHINFER_THROW(ArgumentError) << op
                                    << ": q.shape[3] must be a multiple of 64 up to 256 and v.shape[3] one of 32, got "
                                    << p.key_dim << " and " << p.value_dim;
  }
  Expect(op, "state", state)
      .same_device(q, "q")
      .dtype({dl_float32})
      .rank(4)
      .dim(0, p.sequences, "q.shape[0]")
      .dim(1, p.value_heads, "v.shape[2]")
      .dim(2, p.key_dim, "q.shape[3]")
      .dim(3, p.value_dim, "v.shape[3]")
      .contiguous();
  p.initial = {state.data_ptr(), state.stride(0), 0, state.stride(1), state.stride(2), {}};
  p.scale = ScaleOf(scale, p.key_dim);
  p.softplus_beta = 1.f, p.softplus_threshold = 20.f, p.normalise = normalise;
  p.is_vectorised = Aligned(p.initial.data, 16);
  p.enable_pdl = UsePdl(true, q.device());
  DeviceGuard guard(q.device());
  const flashinfer::Stream stream = get_stream(q.device());
  CheckStatus(op, q.dtype().code == kDLBfloat ? flashinfer::recurrent::KMajorStep<flashinfer::bfloat16_t>(p, stream)
                                              : flashinfer::recurrent::KMajorStep<flashinfer::float16_t>(p, stream));
}
