// SPDX-License-Identifier: Apache-2.0
// Launchers of Kimi delta attention token by token, and of what stands around a step in its layer.
#include "recurrent_step.h"
// clang-format off
#include <flashinfer/recurrent/kda_layer.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/kda_layer.h>
#include <flashinfer/recurrent/cpu/step.h>
#elif defined(__CUDACC__)
#include <flashinfer/recurrent/kda_layer.cuh>
#include <flashinfer/recurrent/step.cuh>
#endif
// clang-format on

using namespace recurrent_step;  // NOLINT(*)
using flashinfer::recurrent::KimiDeltaRule;

namespace {

constexpr const char* FUNCTIONS[] = {"recurrent_kda", "packed_kda_decode", "fused_kda_decode",
                                     "packed_fused_kda_decode"};

/// Parameters of the gate: A_log of one number per value head, dt_bias of one per channel.
void SetGate(const char* op, StepParams& p, const OptionalView& a_log, const OptionalView& dt_bias,
             const TensorView& v) {
  if (a_log.has_value()) {
    const TensorView& t = a_log.value();
    Expect(op, "A_log", t).same_device(v, "v").dtype({dl_float32}).numel(p.value_heads).contiguous();
    p.a_log = t.data_ptr<float>();
  }
  if (dt_bias.has_value()) {
    const TensorView& t = dt_bias.value();
    Expect(op, "dt_bias", t).same_device(v, "v").dtype({dl_float32, dl_bfloat16}).contiguous();
    Expect(op, "dt_bias", t).numel(p.value_heads * p.key_dim);
    p.dt_bias = {t.data_ptr(), {0, 0, p.key_dim}, TypeOf(t)};
  }
}

/// Slots as a vector, or as a matrix with a column for each token.
Indices SlotsOf(const char* op, const char* name, const TensorView& t, const TensorView& q, int64_t rows, int64_t end) {
  return IndicesOf(op, name, t, q, t.ndim() == 2 ? 2 : 1, rows, "sequences", end);
}

}  // namespace

/// Any number of tokens of each sequence. `state`: one for each sequence, or a pool with `slots` [N] or [N, tokens]; with
/// `each`, the state after token t goes to slots[n, t] and no other is written. `source`: states to begin from instead.
void kda_step(TensorView out, TensorView q, TensorView k, TensorView v, TensorView g, TensorView beta,
              OptionalView a_log, OptionalView dt_bias, OptionalView state, OptionalView slots, OptionalView accepted,
              OptionalView source, OptionalView source_slots, OptionalView starts, bool each, bool writes_final,
              int64_t gate, double lower_bound, double scale, bool normalise, bool beta_is_logit,
              OptionalView corrections, OptionalView keys_and_gates, OptionalView checkpoints,
              OptionalView checkpoint_starts, OptionalView checkpoint_rows, int64_t every, int64_t first_slot,
              int64_t function) {
  const char* op = FUNCTIONS[function];
  StepParams p{};
  Expect(op, "q", q).dtype({dl_bfloat16});
  SetTokens(op, p, q, k, v);
  SetOutput(op, p, out, "output", v);
  if (p.key_dim != 64 && p.key_dim != 128) {
    FLASHINFER_THROW(ArgumentError) << op << ": q.shape[3] must be 64 or 128, got " << p.key_dim;
  }
  Expect(op, "g", g).same_device(q, "q").same_dtype(q, "q").rank(4).dim(0, q.size(0), "q.shape[0]");
  Expect(op, "g", g).dim(1, q.size(1), "q.shape[1]").dim(2, p.value_heads, "v.shape[2]");
  Expect(op, "g", g).dim(3, p.key_dim, "q.shape[3]").last_dim_contiguous();
  p.g = g.data_ptr(), p.g_stride = StridesOf(g);
  p.b = GateOf(op, "beta", p, beta, v);
  SetGate(op, p, a_log, dt_bias, v);
  p.gate = static_cast<KimiDeltaRule::Gate>(gate), p.lower_bound = float(lower_bound);
  p.beta_is_logit = beta_is_logit, p.normalise = normalise, p.zero_skipped = true;
  p.scale = std::isnan(scale) ? 1.f / std::sqrt(float(p.key_dim)) : float(scale);
  p.first_slot = first_slot;
  if (starts.has_value()) {
    const TensorView& t = starts.value();
    Expect(op, "cu_seqlens", t).rank(1);
    Expect(op, "q", q).dim(0, 1, "packed sequences");
    if (t.size(0) < 1) FLASHINFER_THROW(ArgumentError) << op << ": cu_seqlens must not be empty, got 0 elements";
    p.starts = IndicesOf(op, "cu_seqlens", t, q, 1, t.size(0), "cu_seqlens.shape[0]", p.tokens + 1);
    p.sequences = t.size(0) - 1;
#ifdef FLASHINFER_CPU
    for (int64_t n = 0; n < t.size(0); ++n) {
      if (p.starts.At(n) < (n == 0 ? 0 : p.starts.At(n - 1))) {
        FLASHINFER_THROW(ArgumentError) << op << ": cu_seqlens must not fall, got " << p.starts.At(n) << " at " << n;
      }
    }
#endif
  }
  DLDataType type = dl_float32;
  if (state.has_value()) {
    const TensorView& t = state.value();
    Expect(op, "initial_state", t).dtype({dl_float32, dl_bfloat16});
    type = t.dtype();
    p.initial = StatesOf(op, "initial_state", p, t, q);
    if (slots.has_value()) {
      p.initial.slots = SlotsOf(op, "ssm_state_indices", slots.value(), q, p.sequences, t.size(0));
      p.read_columns = slots.value().ndim() == 2 ? slots.value().size(1) : 1;
    } else {
      Expect(op, "initial_state", t).dim(0, p.sequences, "sequences");
    }
    if (each) {
      p.each = p.initial;
      if (starts.has_value()) p.tokens = p.read_columns;
    } else if (writes_final) {
      p.final = p.initial;
    }
  }
  if (source.has_value()) {
    const TensorView& t = source.value();
    if (state.has_value()) Expect(op, "initial_state_source", t).same_dtype(state.value(), "initial_state");
    Expect(op, "initial_state_source", t).dtype({dl_float32, dl_bfloat16});
    type = t.dtype();
    p.initial = StatesOf(op, "initial_state_source", p, t, q);
    if (source_slots.has_value()) {
      p.initial.slots =
          IndicesOf(op, "initial_state_indices", source_slots.value(), q, 1, p.sequences, "sequences", t.size(0));
    }
  } else if (accepted.has_value()) {
    p.accepted = IndicesOf(op, "num_accepted_tokens", accepted.value(), q, 1, p.sequences, "sequences");
  }
  const auto recording = [&](const char* name, const TensorView& t, DLDataType dtype, int64_t width) {
    Expect(op, name, t).same_device(q, "q").dtype({dtype}).rank(4).dim(1, p.value_heads, "v.shape[2]");
    Expect(op, name, t).dim(2, p.tokens, "q.shape[1]").dim(3, width, "channels").contiguous();
    if (state.has_value()) Expect(op, name, t).dim(0, state.value().size(0), "initial_state.shape[0]");
    return t.stride(0);
  };
  if (starts.has_value() && corrections.has_value()) p.tokens = corrections.value().size(2);
  if (starts.has_value() && keys_and_gates.has_value()) p.tokens = keys_and_gates.value().size(2);
  if (corrections.has_value()) {
    p.record.correction_slot = recording("correction_cache", corrections.value(), dl_float32, p.value_dim);
    p.record.corrections = corrections.value().data_ptr<float>();
  }
  if (keys_and_gates.has_value()) {
    p.record.key_slot = recording("kg_cache", keys_and_gates.value(), dl_bfloat16, 2 * p.key_dim);
    p.record.keys = keys_and_gates.value().data_ptr(), p.record.gates = true;
  }
  if (checkpoints.has_value()) {
    const TensorView& t = checkpoints.value();
    if (state.has_value() || source.has_value()) {
      Expect(op, "state_checkpoints", t).dtype({type});
    } else {
      Expect(op, "state_checkpoints", t).dtype({dl_float32, dl_bfloat16});
      type = t.dtype();
    }
    p.checkpoints.states = StatesOf(op, "state_checkpoints", p, t, q);
    p.checkpoints.starts = IndicesOf(op, "checkpoint_cu_starts", checkpoint_starts.value(), q, 1,
                                     checkpoint_starts.value().size(0), "checkpoint_cu_starts.shape[0]");
    if (checkpoint_starts.value().size(0) < p.sequences) {
      FLASHINFER_THROW(ArgumentError) << op << ": checkpoint_cu_starts must have an entry for each of " << p.sequences
                                      << " sequences, got " << checkpoint_starts.value().size(0);
    }
    if (checkpoint_rows.has_value()) {
      const TensorView& rows = checkpoint_rows.value();
      p.checkpoints.rows = IndicesOf(op, "checkpoint_state_indices", rows, q, 1, rows.size(0), "rows", t.size(0));
    }
    p.checkpoints.every = every;
  }
  p.is_vectorised = IsVectorised(p, type.bits / 8) &&
                    (p.checkpoints.states.data == nullptr || Aligned(p.checkpoints.states, type.bits / 8));
  p.enable_pdl = UsePdl(true, q.device());
  DeviceGuard guard(q.device());
  RunOf<KimiDeltaRule, flashinfer::bfloat16_t>(op, p, type, get_stream(q.device()));
}

/// One call of decode on a pool: kda_step with fewer arguments, each of which takes the host 0.04 us.
void kda_decode(TensorView out, TensorView q, TensorView k, TensorView v, TensorView g, TensorView beta,
                OptionalView a_log, OptionalView dt_bias, TensorView state, TensorView slots, int64_t gate,
                double lower_bound, double scale, bool normalise, bool beta_is_logit) {
  const OptionalView none;
  kda_step(out, q, k, v, g, beta, a_log, dt_bias, state, slots, none, none, none, none, false, true, gate, lower_bound,
           scale, normalise, beta_is_logit, none, none, none, none, none, 0, 0, 0);
}

/// The short convolution before a step (recurrent/kda_layer.h): `out` and `x` [tokens, channels].
void kda_convolution(TensorView out, TensorView x, TensorView weight, TensorView window, TensorView slots,
                     OptionalView starts, OptionalView accepted, int64_t function) {
  const char* op = FUNCTIONS[function];
  flashinfer::recurrent::ConvolutionParams p{};
  Expect(op, "x", x).on_device().rank(2).dtype({dl_bfloat16}).last_dim_contiguous();
  Expect(op, "out", out).same_device(x, "x").same_shape(x, "x").same_dtype(x, "x").contiguous();
  p.channels = x.size(1), p.tokens = x.size(0), p.x_stride = x.stride(0);
  Expect(op, "weight", weight).same_device(x, "x").dtype({dl_float32}).rank(3).dim(0, 3, "q, k, v").dim(1, 4, "taps");
  Expect(op, "weight", weight).contiguous();
  if (3 * weight.size(2) != p.channels) {
    FLASHINFER_THROW(ArgumentError) << op << ": weight.shape[2] must be x.shape[1] / 3, got " << weight.size(2)
                                    << " for " << p.channels;
  }
  Expect(op, "conv_state", window).same_device(x, "x").dtype({dl_bfloat16}).rank(3).dim(1, p.channels, "x.shape[1]");
  p.window = window.size(2);
  if (p.window < 3) {
    FLASHINFER_THROW(ArgumentError) << op << ": conv_state.shape[2] must be 3 or more, got " << p.window;
  }
  p.sequences = starts.has_value() ? starts.value().size(0) - 1 : x.size(0);
  if (starts.has_value()) {
    p.starts = IndicesOf(op, "query_start_loc", starts.value(), x, 1, p.sequences + 1, "sequences", p.tokens + 1);
  }
  if (accepted.has_value()) {
    p.accepted = IndicesOf(op, "num_accepted_tokens", accepted.value(), x, 1, p.sequences, "sequences");
  }
  p.slots = SlotsOf(op, "state_indices", slots, x, p.sequences, window.size(0));
  p.x = x.data_ptr(), p.out = out.data_ptr(), p.weight = weight.data_ptr<float>(), p.state = window.data_ptr();
  p.slot_stride = window.stride(0), p.channel_stride = window.stride(1), p.time_stride = window.stride(2);
  DeviceGuard guard(x.device());
  CheckStatus(op, flashinfer::recurrent::Convolve(p, get_stream(x.device())));
}

/// The gated norm after a step (recurrent/kda_layer.h): `x` [tokens, heads, dim] fp32.
void kda_gated_norm(TensorView out, TensorView x, TensorView gate, TensorView weight, double eps, int64_t function) {
  const char* op = FUNCTIONS[function];
  flashinfer::recurrent::HeadNormParams p{};
  Expect(op, "x", x).on_device().rank(3).dtype({dl_float32}).contiguous();
  Expect(op, "output", out).same_device(x, "x").dtype({dl_bfloat16}).numel(x.numel()).contiguous();
  Expect(op, "output_gate", gate).same_device(x, "x").dtype({dl_bfloat16}).numel(x.numel()).contiguous();
  Expect(op, "norm_weight", weight).same_device(x, "x").dtype({dl_float32, dl_bfloat16}).rank(1).contiguous();
  Expect(op, "norm_weight", weight).dim(0, x.size(2), "the head dimension");
  p.rows = x.size(0) * x.size(1), p.dim = x.size(2), p.eps = float(eps);
  p.x = x.data_ptr<float>(), p.gate = gate.data_ptr(), p.out = out.data_ptr();
  p.weight = weight.data_ptr(), p.weight_type = TypeOf(weight);
  DeviceGuard guard(x.device());
  CheckStatus(op, flashinfer::recurrent::GatedHeadNorm(p, get_stream(x.device())));
}
