// SPDX-License-Identifier: Apache-2.0
// State update by replay: parameters and entries, shared by both backends.
//
// A slot has a state (the checkpoint) and rings with the tokens since: x of each head, B of each group, processed dt of each
// head. A call replays the p live rows of the ring, runs T new tokens and appends them to the ring. The state is written only
// when the ring would overflow (p + T > window), and then without the new tokens, which may yet be rejected.
//
//   ring row  start  start+1 ... start+p-1 | start+p ... start+p+T-1 | free          (modulo the ring's length)
//             live, replayed               | appended by this call   |
//
// With G the cumulated log decay over the p + T rows, output t is
//   y_t = e^(G_t) C_t s  +  sum_{i <= t} e^(G_t - G_i) dt_i (C_t . B_i) x_i
// so the replayed state is formed only where it is written: s' = e^(G_p) s + sum_{i < p} e^(G_p - G_i) dt_i x_i B_i^T.
// Every exponent is a difference with i <= t. Defined in ssu/replay.cuh (CUDA) and cpu/ssu_replay.h (CPU).
//   test  pytest tests/recurrent -k replay      bench  python benchmarks/bench_recurrent_mamba.py -k checkpointing
#pragma once
#include "arrays.h"

namespace flashinfer {
namespace recurrent {

constexpr int MAX_REPLAYED = 16;  // live rows, and new tokens, of a sequence
constexpr int REPLAY_ROWS = 2 * MAX_REPLAYED;

/// A ring of rows: (slots, heads or groups, length, width), width contiguous.
template <typename T>
struct RingArray {
  T* data;
  int64_t slot, head, row;
};

template <typename State, typename Input>
struct ReplayParams {
  StateArray<State> state;
  RingArray<Input> x_ring, b_ring;
  RingArray<float> dt_ring;
  const int32_t *ring_start, *live;  ///< one number for each slot
  TokenArray<const Input> x, z, b, c;
  TokenArray<Input> out;
  WeightArray dt, dt_bias, d;  ///< dt and dt_bias: one number for each head
  const float* a;
  int64_t a_head;
  IndexArray source, cu_seqlens;
  const int64_t* seed;
  int64_t pad, slots, total_tokens;
  int sequences, tokens, heads, heads_per_group, dim, dstate;
  int window, length;  ///< rows of a ring that may be live, and all
  int rounds;
  bool softplus;
  /// Scratch of the form in two kernels: weights of new rows (16 x 16 for each sequence and head) and of live rows
  /// (16 x ceil8(window)), and the decays e^(G_t) of the new tokens. Null: one kernel.
  Input *new_weights, *old_weights;
  float* decays;
  int heads_per_block;  ///< heads per block of the kernel that computes the weights; 0: those of a group
};

/// Tables of device pointers for many layers; X_slot: distances of slots in elements. Inside a slot everything is dense.
template <typename State, typename Input>
struct MaterializeParams {
  const int64_t *state, *state_slot, *x_ring, *x_slot, *b_ring, *b_slot, *dt_ring, *dt_slot, *a, *scale, *scale_slot;
  const int32_t *source, *target;             ///< (layers, requests)
  const int32_t *ring_start, *live, *active;  ///< (requests); active ends at the first -1
  const int64_t* seed;
  int64_t pad;
  int layers, requests, active_count, heads, heads_per_group, dim, dstate, length, rounds;
};

#ifdef FLASHINFER_CPU
template <typename State, typename Input>
Status ReplayUpdate(const ReplayParams<State, Input>& params, Stream stream);
template <typename State, typename Input>
Status Materialize(const MaterializeParams<State, Input>& params, Stream stream);
#else
template <int WIDTH, typename State, typename Input>
Status LaunchReplay(const ReplayParams<State, Input>& params, Stream stream);
template <int WIDTH, typename State, typename Input>
Status LaunchMaterialize(const MaterializeParams<State, Input>& params, Stream stream);

template <typename State, typename Input>
Status ReplayUpdate(const ReplayParams<State, Input>& params, Stream stream) {
  if (params.dstate <= 64) return LaunchReplay<64>(params, stream);
  return params.dstate <= 128 ? LaunchReplay<128>(params, stream) : LaunchReplay<256>(params, stream);
}
template <typename State, typename Input>
Status Materialize(const MaterializeParams<State, Input>& params, Stream stream) {
  if (params.dstate <= 64) return LaunchMaterialize<64>(params, stream);
  return params.dstate <= 128 ? LaunchMaterialize<128>(params, stream) : LaunchMaterialize<256>(params, stream);
}
#endif

}  // namespace recurrent
}  // namespace flashinfer
