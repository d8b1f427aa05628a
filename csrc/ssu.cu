// SPDX-License-Identifier: Apache-2.0
// Launcher of the selective state update: argument checks, strided arrays, stream. One module for each pair of types.
#include "recurrent_arguments.h"
// clang-format off
#include <flashinfer/recurrent/ssu.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/ssu.h>
#elif defined(__CUDACC__)
#include <flashinfer/recurrent/ssu/kernel.cuh>
#endif
// clang-format on

namespace {

using namespace flashinfer;
using namespace flashinfer::recurrent;
#include "ssu_config.inc"

constexpr const char* OP = "selective_state_update";
constexpr bool IS_SCALED = std::is_same_v<State, int16_t>;

[[noreturn]] __attribute__((noinline, cold)) void Refuse(const char* name, const char* must, int64_t got) {
  FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must " << must << ", got " << got;
}

/// Check an array of the shape of x, but for its last two dimensions (heads or groups, and numbers of each).
void CheckLike(const char* name, const TensorView& t, const TensorView& x, int64_t heads, int64_t size) {
  Expect expect(OP, name, t);
  expect.same_device(x, "x").rank(x.ndim());
  for (int i = 0; i + 2 < x.ndim(); ++i) expect.dim(i, x.size(i), "that of x");
  if (heads > 0) expect.dim(x.ndim() - 2, heads, "the heads of state");
  expect.dim(x.ndim() - 1, size, heads > 0 ? "the dim of state" : "the dstate of state");
}

bool IsTied(const TensorView& t, int from) {
  for (int i = from; i < t.ndim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) != 0) return false;
  }
  return true;
}

}  // namespace

void selective_state_update(TensorView out, TensorView state, TensorView x, TensorView dt, TensorView a, TensorView b,
                            TensorView c, TensorView d, Optional<TensorView> z, Optional<TensorView> dt_bias,
                            Optional<TensorView> state_scale, Optional<TensorView> source, Optional<TensorView> target,
                            Optional<TensorView> cu_seqlens, Optional<TensorView> accepted, Optional<TensorView> kept,
                            Optional<TensorView> kept_index, Optional<TensorView> kept_scale, Optional<TensorView> seed,
                            bool softplus, bool disable_update, int64_t pad, int64_t rounds, int64_t cache_steps) {
  Expect(OP, "state", state).on_device().rank(4).last_dim_contiguous().distinct();
  const int64_t heads = state.size(1), dim = state.size(2), dstate = state.size(3);
  const bool is_packed = cu_seqlens.has_value();
  Expect(OP, "x", x).same_device(state, "state").rank(is_packed ? 3 : cache_steps > 0 ? 4 : 3).last_dim_contiguous();
  CheckLike("x", x, x, heads, dim);
  if (x.ndim() == 4) Expect(OP, "x", x).dim(1, cache_steps, "cache_steps");
  CheckLike("dt", dt, x, heads, dim);
  for (auto [name, t] : {std::pair{"B", &b}, std::pair{"C", &c}}) {
    CheckLike(name, *t, x, 0, dstate);
    Expect(OP, name, *t).same_dtype(x, "x").last_dim_contiguous();
  }
  Expect(OP, "C", c).same_shape(b, "B");
  const int64_t groups = b.size(-2);
  if (groups <= 0 || heads % groups != 0) Refuse("B.shape[-2]", "divide the heads of state", groups);
  CheckLike("out", out, x, heads, dim);
  Expect(OP, "out", out).same_dtype(x, "x").last_dim_contiguous().distinct();
  if (z.has_value()) {
    CheckLike("z", z.value(), x, heads, dim);
    Expect(OP, "z", z.value()).same_dtype(x, "x").last_dim_contiguous();
  }
  Expect(OP, "out", out).apart(state, "state").apart(x, "x").apart(dt, "dt").apart(b, "B").apart(c, "C").apart(z, "z");
  Expect(OP, "A", a).same_device(state, "state").dtype({dl_float32}).rank(3);
  Expect(OP, "A", a)
      .dim(0, heads, "the heads of state")
      .dim(1, dim, "the dim of state")
      .dim(2, dstate, "that of state");
#ifndef FLASHINFER_CPU
  constexpr int VECTOR = std::is_same_v<State, float> ? 4 : 8;
  if (dstate > MAX_DSTATE || dstate % VECTOR != 0) Refuse("state.shape[3]", "be a multiple of 8, at most 256", dstate);
  CheckAlignment(OP, "state", state, VECTOR * state.dtype().bits / 8);
#endif

  SsuParams<State, Input> p{};
  p.state = AsState<State>(state);
  p.x = AsTokens<const Input>(x, is_packed);
  p.b = AsTokens<const Input>(b, is_packed);
  p.c = AsTokens<const Input>(c, is_packed);
  p.out = AsTokens<Input>(out, is_packed);
  if (z.has_value()) p.z = AsTokens<const Input>(z.value(), is_packed);
  p.dt = AsWeights(OP, "dt", dt, state, x.ndim());
  p.dt.batch = dt.stride(0);
  p.dt.token = is_packed ? dt.stride(0) : dt.ndim() == 4 ? dt.stride(1) : 0;
  p.d = AsWeights(OP, "D", d, state, 2);
  Expect(OP, "D", d).dim(0, heads, "the heads of state").dim(1, dim, "the dim of state");
  p.is_tied = IsTied(a, 1) && IsTied(dt, x.ndim() - 1);
  if (dt_bias.has_value()) {
    p.dt_bias = AsWeights(OP, "dt_bias", dt_bias.value(), state, 2);
    Expect(OP, "dt_bias", dt_bias.value()).dim(0, heads, "the heads of state").dim(1, dim, "the dim of state");
    p.is_tied = p.is_tied && IsTied(dt_bias.value(), 1);
  }
  p.a = a.data_ptr<float>();
  p.a_head = a.stride(0);
  p.a_row = a.size(1) > 1 ? a.stride(1) : 0;
  p.a_column = a.size(2) > 1 ? a.stride(2) : 0;

  p.cu_seqlens = AsIndices(OP, "cu_seqlens", cu_seqlens, state);
  p.sequences = int(is_packed ? cu_seqlens.value().size(0) - 1 : x.size(0));
  if (p.sequences < 0) Refuse("cu_seqlens", "have at least 1 element", 0);
  p.source = AsIndices(OP, "state_batch_indices", source, state, 2);
  p.target = AsIndices(OP, "dst_state_batch_indices", target, state, 2);
  p.accepted = AsIndices(OP, "num_accepted_tokens", accepted, state);
  for (auto [name, t] :
       {std::pair{"state_batch_indices", &source}, std::pair{"dst_state_batch_indices", &target},
        std::pair{"num_accepted_tokens", &accepted}, std::pair{"intermediate_state_indices", &kept_index}}) {
    if (t->has_value()) Expect(OP, name, t->value()).rank(1, 2).dim(0, p.sequences, "the number of sequences");
  }
  p.slots = state.size(0);
  if (!source.has_value() && p.slots < p.sequences) {
    Refuse("state.shape[0]", "be at least the number of sequences (state_batch_indices is None)", p.slots);
  }
  if (accepted.has_value() && !source.has_value()) {
    FLASHINFER_THROW(ArgumentError) << OP << ": state_batch_indices must be given with num_accepted_tokens, got None";
  }
  p.tokens = int(cache_steps > 0 ? cache_steps : 1);
  p.total_tokens = x.size(0);

  if (IS_SCALED != state_scale.has_value()) {
    FLASHINFER_THROW(ArgumentError) << OP << ": state_scale must be "
                                    << (IS_SCALED ? "given for" : "None unless state is") << " int16, got "
                                    << (IS_SCALED ? "None" : "a tensor");
  }
  if (IS_SCALED) {
    CheckScale(OP, "state_scale", state_scale.value(), state);
    p.state.scale = state_scale.value().data_ptr<float>();
    p.state.scale_slot = state_scale.value().stride(0);
    p.state.scale_head = state_scale.value().stride(1);
    Expect(OP, "state_scale", state_scale.value()).dim(0, p.slots, "the slots of state");
  }
  if (kept.has_value()) {
    const TensorView& buffer = kept.value();
    if (target.has_value()) {
      FLASHINFER_THROW(ArgumentError) << OP << ": dst_state_batch_indices must be None with intermediate_states_buffer "
                                      << "(they exclude each other), got a tensor";
    }
    Expect expect(OP, "intermediate_states_buffer", buffer);
    expect.same_device(state, "state").same_dtype(state, "state").rank(5).last_dim_contiguous();
    expect.dim(2, heads, "the heads of state").dim(3, dim, "the dim of state").dim(4, dstate, "that of state");
    if (buffer.size(1) < p.tokens) {
      Refuse("intermediate_states_buffer.shape[1]", "be at least the number of tokens of a sequence", buffer.size(1));
    }
    CheckAlignment(OP, "intermediate_states_buffer", buffer, 16);
    p.kept = {buffer.data_ptr<State>(), buffer.stride(0), buffer.stride(2), buffer.stride(3), nullptr, 0, 0};
    p.kept_token = buffer.stride(1);
    p.kept_rows = buffer.size(0);
    p.kept_index = AsIndices(OP, "intermediate_state_indices", kept_index, state);
    if (source.has_value() && kept_index.has_value() &&
        source.value().dtype().bits != kept_index.value().dtype().bits) {
      FLASHINFER_THROW(ArgumentError) << OP << ": intermediate_state_indices must be " << source.value().dtype()
                                      << " (the dtype of state_batch_indices), got " << kept_index.value().dtype();
    }
    if (IS_SCALED) {
      if (!kept_scale.has_value()) {
        FLASHINFER_THROW(ArgumentError) << OP << ": intermediate_state_scales must be given for int16, got None";
      }
      CheckScale(OP, "intermediate_state_scales", kept_scale.value(), state, 1);
      p.kept.scale = kept_scale.value().data_ptr<float>();
      p.kept.scale_slot = kept_scale.value().stride(0);
      p.kept_scale_token = kept_scale.value().stride(1);
      p.kept.scale_head = kept_scale.value().stride(2);
    }
  }
  if (seed.has_value()) {
    Expect(OP, "rand_seed", seed.value()).dtype({dl_int64}).numel(1).same_device(state, "state");
    if (state_scale.has_value()) {
      FLASHINFER_THROW(ArgumentError) << OP << ": rand_seed must be None with state_scale, got a tensor";
    }
    if (rounds <= 0) Refuse("philox_rounds", "be positive", rounds);
    if (std::is_same_v<State, float16_t>) p.seed = seed.value().data_ptr<int64_t>();
  }
  p.pad = pad;
  p.heads = int(heads);
  p.heads_per_group = int(heads / groups);
  p.dim = int(dim);
  p.dstate = int(dstate);
  p.rounds = int(rounds);
  p.softplus = softplus;
  p.update = !disable_update;
  p.enable_pdl = UsePdl(true, state.device());
  DeviceGuard guard(state.device());
  const Status status = SelectiveStateUpdate(p, get_stream(state.device()));
#ifdef FLASHINFER_CPU
  if (status == BAD_SLOT) {
    FLASHINFER_THROW(ArgumentError) << OP
                                    << ": state_batch_indices and dst_state_batch_indices must be pad_slot_id or below "
                                    << p.slots << " (the slots of state), got others";
  }
  if (status == BAD_SEQLEN) {
    FLASHINFER_THROW(ArgumentError) << OP << ": cu_seqlens must not fall nor exceed " << p.total_tokens
                                    << " (the tokens of x), got others";
  }
#endif
  CheckStatus(OP, status);
}

/// One token of each sequence: selective_state_update with fewer arguments, each of which takes the host 0.04 us.
void ssu_decode(TensorView out, TensorView state, TensorView x, TensorView dt, TensorView a, TensorView b, TensorView c,
                TensorView d, Optional<TensorView> z, Optional<TensorView> dt_bias, Optional<TensorView> source,
                Optional<TensorView> target, bool softplus, int64_t pad) {
  const Optional<TensorView> none;
  selective_state_update(out, state, x, dt, a, b, c, d, z, dt_bias, none, source, target, none, none, none, none, none,
                         none, softplus, false, pad, 10, 0);
}
