// SPDX-License-Identifier: Apache-2.0
// Launchers of the state update by replay: argument checks, strided arrays, stream. One module for each pair of types.
#include "recurrent_arguments.h"
// clang-format off
#include <flashinfer/recurrent/ssu_replay.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/ssu_replay.h>
#elif defined(__CUDACC__)
#include <flashinfer/recurrent/ssu/replay.cuh>
#endif
// clang-format on

namespace {

using namespace flashinfer;
using namespace flashinfer::recurrent;
#include "ssu_replay_config.inc"

constexpr const char* OP = "checkpointing_ssu";
constexpr bool IS_SCALED = std::is_same_v<State, int8_t> || std::is_same_v<State, float8_e4m3_t>;
constexpr bool CAN_BE_RANDOM = IS_SCALED || std::is_same_v<State, float16_t>;

[[noreturn]] __attribute__((noinline, cold)) void Refuse(const char* name, const char* must, int64_t got) {
  FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must " << must << ", got " << got;
}

/// Check (slots, heads or groups, length[, width]) with contiguous rows.
template <typename T>
RingArray<T> AsRing(const char* name, const TensorView& t, const TensorView& state, int64_t owners, int64_t length,
                    int64_t width) {
  Expect expect(OP, name, t);
  const int rank = width > 0 ? 4 : 3;
  expect.same_device(state, "state").rank(rank).dim(0, state.size(0), "the slots of state").distinct();
  expect.dim(1, owners, "the heads of state, or the groups of B").dim(2, length, "x_cache.shape[2]");
  if (width > 0) expect.dim(3, width, "the dim or dstate of state").last_dim_contiguous();
  return {static_cast<T*>(t.data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

const int32_t* AsSlotNumbers(const char* name, const TensorView& t, const TensorView& state) {
  Expect(OP, name, t)
      .same_device(state, "state")
      .dtype({dl_int32})
      .rank(1)
      .dim(0, state.size(0), "the slots of state")
      .contiguous();
  return t.data_ptr<int32_t>();
}

}  // namespace

void checkpointing_ssu(TensorView out, TensorView state, TensorView x_cache, TensorView b_cache, TensorView dt_cache,
                       TensorView ring_start, TensorView live, TensorView x, TensorView dt, TensorView a, TensorView b,
                       TensorView c, Optional<TensorView> d, Optional<TensorView> z, Optional<TensorView> dt_bias,
                       Optional<TensorView> state_scale, Optional<TensorView> source, Optional<TensorView> cu_seqlens,
                       Optional<TensorView> seed, Optional<TensorView> cb_scaled, Optional<TensorView> cum_adt,
                       Optional<TensorView> cb_old, bool softplus, int64_t pad, int64_t rounds, int64_t tokens,
                       int64_t heads_per_block) {
  Expect(OP, "state", state).on_device().rank(4).last_dim_contiguous().distinct();
  const int64_t heads = state.size(1), dim = state.size(2), dstate = state.size(3);
  Expect(OP, "x", x).same_device(state, "state").rank(4).last_dim_contiguous();
  Expect(OP, "x", x).dim(2, heads, "the heads of state").dim(3, dim, "the dim of state");
  const bool is_packed = cu_seqlens.has_value();
  if (is_packed) {
    Expect(OP, "x", x).dim(0, 1, "a packed batch");
    Expect(OP, "cu_seqlens", cu_seqlens.value()).dtype({dl_int32});
    if (x.size(1) >= (int64_t{1} << 23)) Refuse("x.shape[1]", "be below 2^23", x.size(1));
  }
  for (auto [name, t] : {std::pair{"dt", &dt}, std::pair{"out", &out}})
    Expect(OP, name, *t).same_shape(x, "x").same_device(x, "x");
  Expect(OP, "out", out).same_dtype(x, "x").last_dim_contiguous().distinct();
  Expect(OP, "B", b)
      .same_device(x, "x")
      .same_dtype(x, "x")
      .rank(4)
      .dim(0, x.size(0), "that of x")
      .dim(1, x.size(1), "that of x");
  Expect(OP, "B", b).dim(3, dstate, "the dstate of state").last_dim_contiguous();
  Expect(OP, "C", c).same_device(x, "x").same_dtype(x, "x").same_shape(b, "B").last_dim_contiguous();
  const int64_t groups = b.size(2);
  if (groups <= 0 || heads % groups != 0) Refuse("B.shape[2]", "divide the heads of state", groups);
  if (z.has_value())
    Expect(OP, "z", z.value()).same_shape(x, "x").same_dtype(x, "x").same_device(x, "x").last_dim_contiguous();
  Expect(OP, "A", a).same_device(state, "state").dtype({dl_float32}).rank(3);
  Expect(OP, "A", a)
      .dim(0, heads, "the heads of state")
      .dim(1, dim, "the dim of state")
      .dim(2, dstate, "that of state");
  Expect(OP, "x_cache", x_cache).rank(4).same_dtype(x, "x");
  Expect(OP, "B_cache", b_cache).same_dtype(x, "x");
  Expect(OP, "dt_cache", dt_cache).dtype({dl_float32});
  const int64_t length = x_cache.size(2), window = length - tokens;
#ifndef FLASHINFER_CPU
  constexpr int VECTOR = std::is_same_v<State, float> ? 4 : 8;
  if (dstate > 256 || dstate % VECTOR != 0) Refuse("state.shape[3]", "be a multiple of 8, at most 256", dstate);
  CheckAlignment(OP, "state", state, VECTOR * state.dtype().bits / 8);
#endif

  ReplayParams<State, Input> p{};
  p.state = AsState<State>(state);
  p.x_ring = AsRing<Input>("x_cache", x_cache, state, heads, length, dim);
  p.b_ring = AsRing<Input>("B_cache", b_cache, state, groups, length, dstate);
  p.dt_ring = AsRing<float>("dt_cache", dt_cache, state, heads, length, 0);
  p.ring_start = AsSlotNumbers("ring_start", ring_start, state);
  p.live = AsSlotNumbers("prev_num_accepted_tokens", live, state);
  p.x = AsTokens<const Input>(x, false);
  p.b = AsTokens<const Input>(b, false);
  p.c = AsTokens<const Input>(c, false);
  p.out = AsTokens<Input>(out, false);
  if (z.has_value()) p.z = AsTokens<const Input>(z.value(), false);
  p.dt = AsWeights(OP, "dt", dt, state, 4);
  p.dt.batch = dt.stride(0);
  p.dt.token = dt.stride(1);
  if (d.has_value()) {
    p.d = AsWeights(OP, "D", d.value(), state, 2);
    Expect(OP, "D", d.value()).dim(0, heads, "the heads of state").dim(1, dim, "the dim of state");
  }
  if (dt_bias.has_value()) {
    p.dt_bias = AsWeights(OP, "dt_bias", dt_bias.value(), state, 2);
    Expect(OP, "dt_bias", dt_bias.value()).dim(0, heads, "the heads of state").dim(1, dim, "the dim of state");
    if (d.has_value()) Expect(OP, "dt_bias", dt_bias.value()).same_dtype(d.value(), "D");
  }
  p.a = a.data_ptr<float>();
  p.a_head = a.stride(0);
  p.cu_seqlens = AsIndices(OP, "cu_seqlens", cu_seqlens, state);
  p.source = AsIndices(OP, "state_batch_indices", source, state);
  p.sequences = int(is_packed ? cu_seqlens.value().size(0) - 1 : x.size(0));
  if (p.sequences < 0) Refuse("cu_seqlens", "have at least 1 element", 0);
  if (source.has_value())
    Expect(OP, "state_batch_indices", source.value()).dim(0, p.sequences, "the number of sequences");
  p.slots = state.size(0);
  if (!source.has_value() && p.slots < p.sequences) {
    Refuse("state.shape[0]", "be at least the number of sequences (state_batch_indices is None)", p.slots);
  }
  if (IS_SCALED) {
    CheckScale(OP, "state_scale", state_scale.value(), state);
    Expect(OP, "state_scale", state_scale.value()).dim(0, p.slots, "the slots of state");
    p.state.scale = state_scale.value().data_ptr<float>();
    p.state.scale_slot = state_scale.value().stride(0);
    p.state.scale_head = state_scale.value().stride(1);
  }
  if (seed.has_value()) {
    Expect(OP, "rand_seed", seed.value()).dtype({dl_int64}).numel(1).same_device(state, "state");
    if (rounds <= 0) Refuse("philox_rounds", "be positive", rounds);
    if (CAN_BE_RANDOM) p.seed = seed.value().data_ptr<int64_t>();
  }
  if (cb_scaled.has_value()) {
    const TensorView &fresh = cb_scaled.value(), &decays = cum_adt.value(), &old = cb_old.value();
    for (auto [name, t, least] :
         {std::tuple{"cb_scaled", &fresh, int64_t(256)}, std::tuple{"cb_old", &old, 16 * ((window + 7) / 8 * 8)},
          std::tuple{"cumAdt_vec", &decays, int64_t(16)}}) {
      Expect(OP, name, *t).same_device(state, "state").contiguous();
      const int64_t needed = int64_t(p.sequences) * heads * least;
      if (t->numel() < needed) {
        FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must have at least " << needed
                                        << " elements (of all sequences and heads), got " << t->numel();
      }
    }
    Expect(OP, "cb_scaled", fresh).same_dtype(x, "x");
    Expect(OP, "cb_old", old).same_dtype(x, "x");
    Expect(OP, "cumAdt_vec", decays).dtype({dl_float32});
    p.new_weights = fresh.data_ptr<Input>();
    p.old_weights = old.data_ptr<Input>();
    p.decays = decays.data_ptr<float>();
  }
  p.pad = pad;
  p.total_tokens = x.size(1);
  p.tokens = int(tokens);
  p.heads = int(heads);
  p.heads_per_group = int(heads / groups);
  p.dim = int(dim);
  p.dstate = int(dstate);
  p.window = int(window);
  p.length = int(length);
  p.rounds = int(rounds);
  p.softplus = softplus;
  p.heads_per_block = int(heads_per_block);
  DeviceGuard guard(state.device());
  const Status status = ReplayUpdate(p, get_stream(state.device()));
#ifdef FLASHINFER_CPU
  if (status == BAD_REPLAY_SLOT) {
    FLASHINFER_THROW(ArgumentError) << OP << ": state_batch_indices must be pad_slot_id or below " << p.slots
                                    << " (the slots of state), got others";
  }
  if (status == BAD_REPLAY_SEQLEN) {
    FLASHINFER_THROW(ArgumentError) << OP << ": cu_seqlens must not fall, nor have a sequence of more than " << p.tokens
                                    << " tokens (max_seqlen), got others";
  }
#endif
  CheckStatus(OP, status);
}

void replayssm_materialize(TensorView state, TensorView state_slot, TensorView x_ring, TensorView x_slot,
                           TensorView b_ring, TensorView b_slot, TensorView dt_ring, TensorView dt_slot, TensorView a,
                           Optional<TensorView> scale, Optional<TensorView> scale_slot, TensorView source,
                           TensorView target, TensorView ring_start, TensorView live, TensorView active,
                           Optional<TensorView> seed, int64_t pad, int64_t heads, int64_t heads_per_group, int64_t dim,
                           int64_t dstate, int64_t length, int64_t rounds) {
  const char* op = "replayssm_materialize";
  MaterializeParams<State, Input> p{};
  const auto table = [&](const char* name, const TensorView& t) {
    Expect(op, name, t)
        .same_device(state, "state_ptrs")
        .dtype({dl_int64})
        .rank(1)
        .dim(0, state.size(0), "the layers")
        .contiguous();
    return t.data_ptr<int64_t>();
  };
  Expect(op, "state_ptrs", state).on_device().rank(1);
  p.state = table("state_ptrs", state), p.state_slot = table("state_slot_strides", state_slot);
  p.x_ring = table("x_cache_ptrs", x_ring), p.x_slot = table("x_cache_slot_strides", x_slot);
  p.b_ring = table("B_cache_ptrs", b_ring), p.b_slot = table("B_cache_slot_strides", b_slot);
  p.dt_ring = table("dt_cache_ptrs", dt_ring), p.dt_slot = table("dt_cache_slot_strides", dt_slot);
  p.a = table("A_ptrs", a);
  if (IS_SCALED) {
    p.scale = table("state_scale_ptrs", scale.value());
    p.scale_slot = table("state_scale_slot_strides", scale_slot.value());
  }
  const auto numbers = [&](const char* name, const TensorView& t, int rank) {
    Expect(op, name, t).same_device(state, "state_ptrs").dtype({dl_int32}).rank(rank).contiguous();
    return t.data_ptr<int32_t>();
  };
  p.source = numbers("src_slots", source, 2), p.target = numbers("dst_slots", target, 2);
  Expect(op, "src_slots", source).dim(0, state.size(0), "the layers");
  Expect(op, "dst_slots", target).same_shape(source, "src_slots");
  p.ring_start = numbers("ring_start", ring_start, 1), p.live = numbers("replay_prefix_len", live, 1);
  p.active = numbers("active_request_indices", active, 1);
  Expect(op, "ring_start", ring_start).dim(0, source.size(1), "the requests");
  Expect(op, "replay_prefix_len", live).dim(0, source.size(1), "the requests");
  if (seed.has_value()) {
    Expect(op, "rand_seed", seed.value()).same_device(state, "state_ptrs").dtype({dl_int64}).numel(1);
    if (CAN_BE_RANDOM) p.seed = seed.value().data_ptr<int64_t>();
  }
  p.pad = pad;
  p.layers = int(state.size(0)), p.requests = int(source.size(1)), p.active_count = int(active.size(0));
  p.heads = int(heads), p.heads_per_group = int(heads_per_group), p.dim = int(dim), p.dstate = int(dstate);
  p.length = int(length), p.rounds = int(rounds);
  DeviceGuard guard(state.device());
  CheckStatus(op, Materialize(p, get_stream(state.device())));
}
