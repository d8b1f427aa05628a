// SPDX-License-Identifier: Apache-2.0
// Launcher of the chunked gated delta rule: argument checks, dtype dispatch, stream.
#include "recurrent_chunk.h"
// clang-format off
#include <flashinfer/recurrent/chunk/blocks.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/gdn_prefill.h>
#else
#include <flashinfer/device/sm_count.h>
#endif
// clang-format on

using flashinfer::recurrent::BytesOfBlocks;
using flashinfer::recurrent::DeltaParams;
using namespace recurrent_chunk;  // NOLINT(*)

namespace {

constexpr char OP[] = "chunk_gated_delta_rule";
#ifdef FLASHINFER_CPU
constexpr bool IS_CPU = true;
#else
constexpr bool IS_CPU = false;
#endif

/// Validate gates [tokens, heads], which may be missing.
const float* GatesOf(const char* name, const OptionalTensor& given, const TensorView& q, int64_t heads) {
  if (!given.has_value()) return nullptr;
  const TensorView t = given.value();
  Expect(OP, name, t)
      .same_device(q, "q")
      .dtype({dl_float32})
      .rank(2)
      .dim(0, q.size(0), "q.shape[0]")
      .dim(1, heads, "the number of output heads")
      .contiguous();
  return t.data_ptr<float>();
}

void ExpectRows(const char* name, const TensorView& t, const TensorView& q) {
  Expect(OP, name, t)
      .same_device(q, "q")
      .same_dtype(q, "q")
      .rank(3)
      .dim(0, q.size(0), "q.shape[0]")
      .dim(2, DIM, "the head dimension")
      .contiguous();
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must be aligned to 16 bytes, got an address that is not";
  }
}

#ifdef FLASHINFER_CPU
/// Check what only the CPU can read without waiting: offsets, and slots within their states.
void CheckNumbers(const Integers& offsets, const Integers& slots, int64_t requests, int64_t tokens,
                  const OptionalTensor& initial, const OptionalTensor& final) {
  for (int64_t i = 0; i <= requests; ++i) {
    const int64_t low = i == 0 ? 0 : offsets[i - 1];
    if (offsets[i] < low || offsets[i] > tokens) {
      FLASHINFER_THROW(ArgumentError) << OP << ": cu_seqlens must not fall and must end within the " << tokens
                                      << " tokens, got " << offsets[i] << " after " << low;
    }
  }
  for (int64_t i = 0; i < requests; ++i) {
    for (const OptionalTensor* states : {&initial, &final}) {
      if (states->has_value() && (slots[i] < 0 || slots[i] >= states->value().size(0))) {
        FLASHINFER_THROW(ArgumentError) << OP << ": state_indices must be slots of the " << states->value().size(0)
                                        << " states, got " << slots[i];
      }
    }
  }
}
#endif

}  // namespace

/// Return the bytes of the workspace of a call: blocks of chunks, and states of the parts of requests.
int64_t gdn_prefill_workspace(int64_t requests, int64_t tokens, int64_t heads, int64_t segment) {
  return BytesOfBlocks(requests, tokens, heads) + flashinfer::recurrent::BytesOfParts(requests, tokens, heads, segment);
}

void gdn_prefill(TensorView output, TensorView q, TensorView k, TensorView v, OptionalTensor g, OptionalTensor beta,
                 double scale, OptionalTensor initial_state, OptionalTensor output_state, TensorView cu_seqlens,
                 OptionalTensor state_indices, OptionalTensor state_checkpoints, OptionalTensor checkpoint_cu_starts,
                 int64_t interval, OptionalTensor q_normalized, OptionalTensor k_normalized, OptionalTensor workspace,
                 int64_t segment) {
  if constexpr (IS_CPU) {  // in float32 too, which models are compared in
    Expect(OP, "q", q).on_device().dtype({dl_float16, dl_bfloat16, dl_float32});
  } else {
    Expect(OP, "q", q).on_device().dtype({dl_float16, dl_bfloat16});
  }
  ExpectRows("q", q, q);
  ExpectRows("k", k, q);
  ExpectRows("v", v, q);
  const int64_t q_heads = q.size(1), k_heads = k.size(1), v_heads = v.size(1);
  const int64_t heads = std::max(q_heads, v_heads), tokens = q.size(0);
  const bool is_grouped = q_heads > 0 && k_heads > 0 && v_heads > 0 &&
                          (k_heads == v_heads ? heads % k_heads == 0 : q_heads == k_heads && heads % q_heads == 0);
  if (!is_grouped) {
    FLASHINFER_THROW(ArgumentError) << OP << ": heads of q, k and v must be n * h, h, h or h, h, n * h, got " << q_heads
                                    << ", " << k_heads << ", " << v_heads;
  }
  ExpectRows("output", output, q);
  Expect(OP, "output", output).dim(1, heads, "the larger number of heads of q and v");
  const int64_t requests = cu_seqlens.numel() - 1;
  DispatchFloat(q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (IS_CPU || !std::is_same_v<T, float>) {
      DeltaParams<T> p;
      p.q = q.data_ptr<T>(), p.k = k.data_ptr<T>(), p.v = v.data_ptr<T>(), p.o = output.data_ptr<T>();
      p.g = GatesOf("g", g, q, heads), p.beta = GatesOf("beta", beta, q, heads);
      p.num_q_heads = int(q_heads), p.num_k_heads = int(k_heads), p.num_v_heads = int(v_heads);
      p.num_heads = int(heads);
      p.scale = float(scale);
      p.tokens = tokens, p.requests = int(requests);
      p.offsets = IntegersOf(OP, "cu_seqlens", cu_seqlens, q, requests + 1);
      p.initial = StatesOf(OP, "initial_state", initial_state, q, heads);
      p.final = StatesOf(OP, "output_state", output_state, q, heads);
      p.slots = IntegersOf(OP, "state_indices", state_indices, q, requests);
      if (interval > 0) {
        p.checkpoints = StatesOf(OP, "state_checkpoints", state_checkpoints, q, heads);
        p.rows = IntegersOf(OP, "checkpoint_cu_starts", checkpoint_cu_starts, q, requests + 1);
        p.interval = p.checkpoints.data == nullptr ? 0 : interval;
      }
#ifdef FLASHINFER_CPU
      CheckNumbers(p.offsets, p.slots, requests, tokens, initial_state, output_state);
#endif
      if (tokens == 0 || requests == 0) return;
      const auto stream = get_stream(q.device());
      DeviceGuard guard(q.device());
      p.enable_pdl = UsePdl(true, q.device());
#ifndef FLASHINFER_CPU
      const int64_t bytes = gdn_prefill_workspace(requests, tokens, heads, segment);
      Expect(OP, "workspace", workspace.value()).same_device(q, "q").numel(bytes);
      p.blocks = workspace.value().data_ptr<char>();
      p.segment = segment;
      p.parts = reinterpret_cast<float*>(p.blocks + BytesOfBlocks(requests, tokens, heads));
      p.num_sms = flashinfer::device::SmCount(q.device().device_id);
#endif
      using flashinfer::recurrent::NormalizeRows;
      if (q_normalized.has_value()) {
        T *const q_rows = q_normalized.value().data_ptr<T>(), *const k_rows = k_normalized.value().data_ptr<T>();
        CheckStatus(OP, NormalizeRows<T>(p.q, q_rows, tokens * q_heads, p.enable_pdl, stream));
        CheckStatus(OP, NormalizeRows<T>(p.k, k_rows, tokens * k_heads, p.enable_pdl, stream));
        p.q = q_rows, p.k = k_rows;
      }
      CheckStatus(OP, flashinfer::recurrent::GdnPrefill<T>(p, stream));
    }
  });
}
