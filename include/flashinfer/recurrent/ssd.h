// SPDX-License-Identifier: Apache-2.0
// Mamba-2 over whole sequences (SSD, prefill): parameters and entries, shared by both backends.
// The recurrence of ssu.h with dt' = clamp(softplus(dt + dt_bias), dt_min, dt_max), from an initial state of each sequence (or
// zeros) to a final one. CUDA goes by chunks of 64 tokens. With G the log decay cumulated inside a chunk and S its first state:
//   Y  = (mask e^(G_i - G_j) dt_j C B^T) X + e^G C S^T        S' = e^(G_last) S + (e^(G_last - G) dt X)^T B
// A chunk ends early where the sequence does, or where a state is to be kept: rows past its end have dt 0 and are zeroed.
// Defined in ssd_sm90/launch.cuh (Hopper), chunk/ssd.cuh (SM80 and later) and cpu/ssd.h.
//   test  pytest tests/recurrent -k ssd      bench  python benchmarks/bench_recurrent_mamba.py -k ssd
#pragma once
#include "arrays.h"

namespace flashinfer {
namespace recurrent {

constexpr int SSD_CHUNK = 64;

/// States of sequences (n, heads, dim, dstate), dense inside a row; `data` null: none.
struct SsdStates {
  void* data;
  WeightType type;
  int64_t row;
};

template <typename Input>
struct SsdParams {
  TokenArray<const Input> x, z, b, c;  ///< z.data null: no gate
  TokenArray<Input> out;
  int64_t out_row;  ///< distance of the rows of a head in `out`
  WeightArray dt, dt_bias, d;
  const float* a;
  SsdStates initial, final, kept;
  const int32_t* bounds;               ///< begin and end of each packed sequence; null: a sequence for each batch entry
  IndexArray kept_tokens, kept_slots;  ///< exclusive token bound (absolute if packed) and row of `kept`, negative: none
  int64_t kept_rows;
  int sequences, tokens, heads, heads_per_group, dim, dstate;
  float dt_min, dt_max;
  bool softplus;
};

/// A sequence: tokens [begin, end) of a batch entry, and the token before which the state is kept (0: nowhere).
struct SsdSequence {
  int64_t batch;
  int begin, end, keep;
  int64_t keep_slot;
};

template <typename Input>
FLASHINFER_HD SsdSequence FindSsdSequence(const SsdParams<Input>& p, int64_t n) {
  SsdSequence s{n, 0, p.tokens, 0, -1};
  if (p.bounds != nullptr) {
    s.batch = 0;
    s.begin = p.bounds[2 * n];
    s.end = p.bounds[2 * n + 1];
    if (s.begin < 0) s.begin = 0;
    if (s.end > p.tokens) s.end = p.tokens;
  }
  if (p.kept.data != nullptr) {
    const int64_t at = p.kept_tokens.At(n), slot = p.kept_slots.At(n);
    if (slot >= 0 && slot < p.kept_rows && at > s.begin && at <= s.end) {
      s.keep = int(at);
      s.keep_slot = slot;
    }
  }
  return s;
}

/// Tokens of the chunk that begins at `at`.
FLASHINFER_HD int SsdChunkLength(const SsdSequence& s, int64_t at) {
  int64_t length = s.end - at < SSD_CHUNK ? s.end - at : SSD_CHUNK;
  if (s.keep > at && s.keep - at < length) length = s.keep - at;
  return int(length);
}

/// Write where each sequence of seq_idx begins and ends, (n, 2) int32; sequences without tokens get 0, 0.
Status SsdBounds(const IndexArray& seq_idx, int32_t* bounds, int tokens, int sequences, Stream stream);

/// Count the logical chunks of each sequence and write the exclusive prefix sums, (sequences + 1) int32. Chunk i begins at token
/// chunk_indices[i] * chunk + chunk_offsets[i].
Status SeqChunkCumsum(const IndexArray& seq_idx, const IndexArray& chunk_indices, const IndexArray& chunk_offsets,
                      int32_t* output, int chunk, int chunks, int tokens, int sequences, Stream stream);

#ifdef FLASHINFER_CPU
template <typename Input>
Status Ssd(const SsdParams<Input>& params, Stream stream);
#else
namespace ssd_chunk {
template <int WIDTH, typename Input>
Status Launch(const SsdParams<Input>& params, Stream stream);
}
namespace ssd_sm90 {
/// True if the Hopper kernel serves the call, on the current device; false in modules without a target that has it.
template <typename Input>
bool Supports(const SsdParams<Input>& params);
template <typename Input>
Status Launch(const SsdParams<Input>& params, Stream stream);
}  // namespace ssd_sm90

template <typename Input>
Status Ssd(const SsdParams<Input>& params, Stream stream) {
  if (ssd_sm90::Supports(params)) return ssd_sm90::Launch(params, stream);
  if (params.dstate <= 64) return ssd_chunk::Launch<64>(params, stream);
  return params.dstate <= 128 ? ssd_chunk::Launch<128>(params, stream) : ssd_chunk::Launch<256>(params, stream);
}
#endif

}  // namespace recurrent
}  // namespace flashinfer
