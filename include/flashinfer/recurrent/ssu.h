// SPDX-License-Identifier: Apache-2.0
// Selective state update (Mamba-1 and -2, decode and verification): parameters and entry, shared by both backends.
// For each sequence, head and row of the state, token by token, in fp32:
//   dt' = dt + dt_bias, softplus if asked;  s = s e^(A dt') + dt' x B;  y = dot(s, C) + D x;  y *= z sigmoid(z)
// State type    stored as
//   float, bfloat16, half   itself; half also with stochastic rounding (round.h) by a seed
//   int16                   round(s * 32767 / amax) of each row, and amax / 32767
// Defined in ssu/kernel.cuh (CUDA) and cpu/ssu.h (CPU).
//   test  pytest tests/recurrent -k ssu      bench  python benchmarks/bench_recurrent_mamba.py -k selective
#pragma once
#include "arrays.h"

namespace flashinfer {
namespace recurrent {

constexpr int MAX_DSTATE = 256;

template <typename State, typename Input>
struct SsuParams {
  StateArray<State> state;
  TokenArray<const Input> x, z, b, c;  ///< z.data is null if there is no gate
  TokenArray<Input> out;
  WeightArray dt, dt_bias, d;
  const float* a;
  int64_t a_head, a_row, a_column;
  IndexArray source, target;        ///< slots; null: the sequence's number; the source
  IndexArray cu_seqlens, accepted;  ///< packed tokens; earlier tokens that were accepted
  IndexArray kept_index;            ///< row of `kept` of a sequence; null: its slot
  StateArray<State> kept;           ///< states after each token; `data` null: none
  int64_t kept_token, kept_scale_token;
  const int64_t* seed;                     ///< null: round to nearest
  int64_t pad;                             ///< slot that stands for no state
  int64_t slots, kept_rows, total_tokens;  ///< total_tokens: of a packed batch
  int sequences, tokens;                   ///< tokens: of each sequence, at most, if packed
  int heads, heads_per_group, dim, dstate;
  int rounds;
  bool softplus, update;
  bool enable_pdl;  ///< CUDA only: programmatic dependent launch
  bool is_tied;     ///< A has one number for each head, and so have dt and dt_bias
};

/// Status of the CPU entry if an index is out of range. CUDA treats such slots as padding.
constexpr int BAD_SLOT = 1, BAD_SEQLEN = 2;

#ifdef FLASHINFER_CPU
template <typename State, typename Input>
Status SelectiveStateUpdate(const SsuParams<State, Input>& params, Stream stream);
#else
/// Launch for rows of up to WIDTH numbers; each width is a unit of its own.
template <int WIDTH, typename State, typename Input>
Status LaunchSsu(const SsuParams<State, Input>& params, Stream stream);

template <typename State, typename Input>
Status SelectiveStateUpdate(const SsuParams<State, Input>& params, Stream stream) {
  if (params.dstate <= 64) return LaunchSsu<64>(params, stream);
  return params.dstate <= 128 ? LaunchSsu<128>(params, stream) : LaunchSsu<MAX_DSTATE>(params, stream);
}
#endif

}  // namespace recurrent
}  // namespace flashinfer
