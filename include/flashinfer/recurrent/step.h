// SPDX-License-Identifier: Apache-2.0
// One pass of a delta rule (rules.h) token by token: decode, verification of drafts, replay. Shared by both backends:
// step.cuh (CUDA), cpu/step.h (CPU). The state is [slot, value head, V, K] with K fastest; all arithmetic is fp32, and
// the state stays in fp32 between the tokens of a call.
//   test  pytest tests/recurrent      bench  python benchmarks/bench_recurrent.py
#pragma once
#include <cstdint>

#include "../backend.h"
#include "../host_device.h"
#include "rules.h"

namespace flashinfer {
namespace recurrent {

/// Element type that a kernel finds out when it runs: of tensors with few elements.
enum class ElementType : int32_t { kFloat, kHalf, kBfloat };

/// Distances between neighbours in a (sequence, token, head, channel) tensor, in elements; channels are contiguous.
struct TokenStrides {
  int64_t sequence, token, head;
  FLASHINFER_HD int64_t Offset(int64_t s, int64_t t, int64_t h) const { return s * sequence + t * token + h * head; }
};

/// A tensor of one number per token and head, or (`token` and `sequence` 0) per head.
struct Numbers {
  const void* data;
  TokenStrides stride;
  ElementType type;
};

/// Slots or lengths as int32 or int64; row n, column c at data[n * row + c * column]. Without data, `At` returns n.
struct Indices {
  const void* data;
  int64_t row, column;
  bool is_wide;
  FLASHINFER_HD int64_t At(int64_t n, int64_t c = 0) const {
    if (data == nullptr) return n;
    const int64_t i = n * row + c * column;
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// States in memory. `token` is 0 where each token has a slot of its own.
struct States {
  void* data;  ///< null: there are none
  int64_t slot, token, head, row;
  Indices slots;
  FLASHINFER_HD int64_t Offset(int64_t s, int64_t t, int64_t h, int64_t v) const {
    return s * slot + t * token + h * head + v * row;
  }
};

/// Record that a verification keeps of its drafts so that a later call can replay the accepted ones; indexed by read slot,
/// each [slots, head, token, channel] and contiguous but for the slots. Null: not wanted.
struct Recordings {
  void* values;        ///< v, 16 bits
  void* keys;          ///< k before it is normalised, by key head; with `gates` in one row of 2 K, by value head
  float* log_decays;   ///< one per value head
  float* betas;        ///< one per value head
  float* corrections;  ///< u = beta (v - S k)
  bool gates;          ///< rows of `keys` are k, then the raw gate, of each value head (KDA)
  int64_t value_slot, key_slot, number_slot, correction_slot;  ///< strides of slots
};

/// Ring of tokens that are not folded into the state yet (GDN): the state before the first token of a call is
///   e^(G_P) S + sum over j < P of e^(G_P - g_j) u_j k_j^T,   row j of the ring at (base + j) % rows
/// with G_P the cumulated log decay of the last one. The tokens of the call are appended.
struct Ring {
  void* k;          ///< [slots, key heads, rows, K], normalised; null: there is no ring
  void* u;          ///< [slots, value heads, rows, V]
  float* g;         ///< [slots, value heads, rows], cumulated log decay
  Indices lengths;  ///< P of each sequence
  Indices bases;    ///< without data: 0
  int64_t rows, k_slot, u_slot, g_slot;
  ElementType type;  ///< type of k and u
  int64_t flush_at;  ///< length from which on the folded state is written to `final`, and g starts again at 0
};

/// States kept every `every` tokens, in rows starts[n] + j: before tokens 0, every, 2 every, ... or, with `rows`, after
/// each completed `every` tokens in row rows[starts[n] + j].
struct Checkpoints {
  States states;  ///< null data: none
  Indices starts, rows;
  int64_t every;
};

/// Parameters by which log decay and beta of a token follow from `a` and `b`.
enum class GateForm : int32_t { kProjections, kGiven };

struct StepParams {
  int64_t sequences, tokens;  ///< tokens: of each sequence, or most of any with `starts`
  int64_t key_heads, value_heads, key_dim, value_dim;
  FastDivisor key_group;  ///< value heads that share a head of q and k
  Indices starts;         ///< first token of each sequence in packed tensors, and the end; without data: no packing

  const void* q;
  const void* k;
  const void* v;
  void* out;  ///< null: no outputs, then q is not read
  TokenStrides q_stride, k_stride, v_stride, out_stride;
  ElementType out_type;
  bool zero_skipped;   ///< outputs of sequences with a negative read slot become 0; otherwise they stay as they are
  bool enable_pdl;     ///< CUDA only: programmatic dependent launch
  bool is_vectorised;  ///< rows of q, k, g and of states begin at multiples of 16 bytes

  Numbers a;      ///< GDN: projection of the decay, or the log decay itself
  const void* g;  ///< KDA: gate or log decay of each key channel
  TokenStrides g_stride;
  Numbers b;           ///< beta or its logit
  const float* a_log;  ///< one number per value head; null: 0
  Numbers dt_bias;     ///< GDN: by value head; KDA: by channel of each value head, `stride.head` apart; null data: 0
  GateForm form;
  KimiDeltaRule::Gate gate;
  bool beta_is_logit, normalise;  ///< normalise: L2 norm of q and k, x * rsqrt(sum x^2 + 1e-6)
  float scale, softplus_beta, softplus_threshold, lower_bound;

  States initial;        ///< null data: zeros
  Indices accepted;      ///< read slot is column max(accepted - 1, 0) of its row; without data: column 0
  int64_t read_columns;  ///< columns of the read slots
  States final;          ///< after the last token, or after the boundary; null data: not written
  States each;           ///< after every token; null data: not written
  Indices boundaries;    ///< accepted_steps: the boundary is after token accepted_steps[n]; without data: `recover`
  int64_t recover;       ///< tokens before the boundary, 0: the boundary is the end
  bool is_replay;        ///< boundaries count tokens, and tensors of tokens are indexed by read slot
  int64_t first_slot;    ///< slots below are skipped: 0, or 1 where slot 0 is a null slot
  Checkpoints checkpoints;
  Recordings record;
  Ring ring;
};

/// The tokens of one sequence.
struct Range {
  int64_t sequence, first, count;  ///< index for the sequence stride, first token, number of tokens
  int64_t boundary;                ///< tokens after which the final state is written
};

FLASHINFER_HD Range RangeOf(const StepParams& p, int64_t n) {
  Range r{n, 0, p.tokens, 0};
  if (p.starts.data != nullptr) {
    r.sequence = 0;
    r.first = p.starts.At(n);
    r.count = p.starts.At(n + 1) - r.first;
    if (r.count > p.tokens) r.count = p.tokens;
  }
  r.boundary = r.count;
  if (p.boundaries.data != nullptr || p.recover > 0) {
    const int64_t wanted = p.boundaries.data != nullptr ? p.boundaries.At(n) + (p.is_replay ? 0 : 1) : p.recover;
    r.boundary = wanted < 0 ? 0 : (wanted < r.count ? wanted : r.count);
    if (p.out == nullptr) r.count = r.boundary;
  }
  return r;
}

/// Slot that the state of sequence n is read from; below first_slot: the sequence is skipped.
FLASHINFER_HD int64_t ReadSlot(const StepParams& p, int64_t n) {
  int64_t column = 0;
  if (p.accepted.data != nullptr) {
    column = p.accepted.At(n) - 1;
    column = column < 0 ? 0 : (column < p.read_columns ? column : p.read_columns - 1);
  }
  return p.initial.slots.At(n, column);
}

/// Run one call. T: element type of q, k, v and g; S: of the states.
template <typename Rule, typename T, typename S>
Status Step(const StepParams& params, Stream stream);

}  // namespace recurrent
}  // namespace flashinfer
