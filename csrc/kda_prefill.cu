// SPDX-License-Identifier: Apache-2.0
// Launcher of chunked Kimi delta attention: argument checks, stream.
#include "recurrent_chunk.h"
// clang-format off
#include <flashinfer/device/sm_count.h>
#include <flashinfer/recurrent/chunk/kda_blocks.h>
// clang-format on

using flashinfer::recurrent::KdaParams;
using flashinfer::recurrent::KimiDeltaRule;
using namespace recurrent_chunk;  // NOLINT(*)

namespace {

constexpr char OP[] = "recurrent_kda";

/// Check rows [batch, tokens, heads, DIM].
void ExpectRows(const char* name, const TensorView& t, const TensorView& q, int64_t heads, const char* of_heads) {
  Expect(OP, name, t).same_device(q, "q").same_dtype(q, "q").rank(4).dim(0, q.size(0), "q.shape[0]");
  Expect(OP, name, t).dim(1, q.size(1), "q.shape[1]").dim(2, heads, of_heads).dim(3, DIM, "channels").contiguous();
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must be aligned to 16 bytes, got an address that is not";
  }
}

/// Validate a pool of states, or a state for each of `rows` requests (0: a pool).
States PoolOf(const char* name, const OptionalTensor& given, const TensorView& q, int64_t heads, int64_t rows) {
  if (!given.has_value()) return {};
  Expect(OP, name, given.value()).dtype({dl_float32, dl_bfloat16});
  if (rows > 0) Expect(OP, name, given.value()).dim(0, rows, "sequences");
  return StatesOf(OP, name, given, q, heads);
}

}  // namespace

/// Return the bytes of the workspace of a call.
int64_t kda_prefill_workspace(int64_t requests, int64_t tokens, int64_t heads) {
  return flashinfer::recurrent::BytesOfKdaBlocks(requests, tokens, heads);
}

void kda_prefill(TensorView output, TensorView q, TensorView k, TensorView v, TensorView g, TensorView beta,
                 OptionalTensor a_log, OptionalTensor dt_bias, OptionalTensor state, OptionalTensor slots,
                 OptionalTensor cu_seqlens, int64_t gate, double lower_bound, double scale, bool normalise,
                 bool beta_is_logit, OptionalTensor checkpoints, OptionalTensor checkpoint_starts,
                 OptionalTensor checkpoint_rows, int64_t every, TensorView workspace) {
  using T = flashinfer::bfloat16_t;
  Expect(OP, "q", q).on_device().rank(4).dtype({dl_bfloat16});
  const int64_t key_heads = q.size(2), heads = v.size(2);
  ExpectRows("q", q, q, key_heads, "heads");
  ExpectRows("k", k, q, key_heads, "q.shape[2]");
  ExpectRows("v", v, q, heads, "heads");
  ExpectRows("g", g, q, heads, "v.shape[2]");
  ExpectRows("output", output, q, heads, "v.shape[2]");
  if (key_heads == 0 || heads % key_heads != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": v.shape[2] must be a multiple of q.shape[2] (" << key_heads
                                    << " heads of q and k), got " << heads;
  }
  Expect(OP, "beta", beta).same_device(q, "q").dtype({dl_bfloat16, dl_float32}).rank(3).contiguous();
  Expect(OP, "beta", beta).dim(0, q.size(0), "q.shape[0]").dim(1, q.size(1), "q.shape[1]").dim(2, heads, "v.shape[2]");
  KdaParams<T> p;
  p.q = q.data_ptr<T>(), p.k = k.data_ptr<T>(), p.v = v.data_ptr<T>(), p.o = output.data_ptr<T>();
  p.gates = g.data_ptr<T>(), p.betas = beta.data_ptr(), p.betas_are_float = beta.dtype().bits == 32;
  p.num_q_heads = p.num_k_heads = int(key_heads), p.num_v_heads = p.num_heads = int(heads);
  if (a_log.has_value()) {
    Expect(OP, "A_log", a_log.value()).same_device(q, "q").dtype({dl_float32}).numel(heads).contiguous();
    p.a_log = a_log.value().data_ptr<float>();
  }
  if (dt_bias.has_value()) {
    Expect(OP, "dt_bias", dt_bias.value()).same_device(q, "q").dtype({dl_float32, dl_bfloat16}).contiguous();
    Expect(OP, "dt_bias", dt_bias.value()).numel(heads * DIM);
    p.dt_bias = dt_bias.value().data_ptr(), p.bias_is_float = dt_bias.value().dtype().bits == 32;
  }
  p.gate = static_cast<KimiDeltaRule::Gate>(gate), p.lower_bound = float(lower_bound);
  p.beta_is_logit = beta_is_logit, p.normalise = normalise, p.scale = float(scale);
  p.tokens = q.size(0) * q.size(1), p.requests = int(q.size(0)), p.each = q.size(1);
  if (cu_seqlens.has_value()) {
    Expect(OP, "q", q).dim(0, 1, "packed sequences");
    p.requests = int(cu_seqlens.value().numel() - 1);
    p.offsets = IntegersOf(OP, "cu_seqlens", cu_seqlens, q, p.requests + 1);
  }
  p.slots = IntegersOf(OP, "ssm_state_indices", slots, q, p.requests);
  p.initial = p.final = PoolOf("initial_state", state, q, heads, slots.has_value() ? 0 : p.requests);
  if (checkpoints.has_value()) {
    if (state.has_value())
      Expect(OP, "state_checkpoints", checkpoints.value()).same_dtype(state.value(), "initial_state");
    p.checkpoints = PoolOf("state_checkpoints", checkpoints, q, heads, 0);
    const int64_t starts = checkpoint_starts.value().numel();
    if (starts < p.requests) {
      FLASHINFER_THROW(ArgumentError) << OP << ": checkpoint_cu_starts must have an entry for each of " << p.requests
                                      << " sequences, got " << starts;
    }
    p.rows = IntegersOf(OP, "checkpoint_cu_starts", checkpoint_starts, q, starts);
    p.keeps_starts = !checkpoint_rows.has_value(), p.interval = every;
    if (checkpoint_rows.has_value()) {
      p.kept_slots = IntegersOf(OP, "checkpoint_state_indices", checkpoint_rows, q, checkpoint_rows.value().numel());
    }
  }
  if (p.tokens == 0 || p.requests == 0) return;
  const auto stream = get_stream(q.device());
  DeviceGuard guard(q.device());
  p.enable_pdl = UsePdl(true, q.device());
  Expect(OP, "workspace", workspace).same_device(q, "q").numel(kda_prefill_workspace(p.requests, p.tokens, heads));
  p.blocks = workspace.data_ptr<char>();
  p.num_sms = flashinfer::device::SmCount(q.device().device_id);
  CheckStatus(OP, flashinfer::recurrent::KdaPrefill<T>(p, stream));
}
