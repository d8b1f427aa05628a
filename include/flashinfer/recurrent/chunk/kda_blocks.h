// SPDX-License-Identifier: Apache-2.0
// Chunked Kimi delta attention: arguments, and what the first kernel (kda_prepare.cuh) leaves in global memory for the second,
// one block per chunk slot and head. G_i are the log decays of a key channel, summed from the start of the chunk to token i:
//
//   K   64 x 128, 16 bits  e^(G_i) k_i                       what S is multiplied by for U
//   Q   64 x 128, 16 bits  scale e^(G_i) q_i                 ... for the outputs
//   R   64 x 128, 16 bits  e^(G_63 - G_i) k_i                by what tokens are added to S
//   T   64 x 64, 16 bits   (I + A)^-1 - I, with A[i][j] = beta_i sum of k_i e^(G_i - G_j) k_j over the channels, for i > j
//   P   64 x 64, 16 bits   scale, sum of q_i e^(G_i - G_j) k_j over the channels, for i >= j; 0 above
//   e   128 floats         e^(G_63): decay of a channel over the chunk
//   b   64 floats          beta_i
//   m   4 floats           the largest of the first and of the last 64 numbers of e, twice
//
// Matrices are slabs of 64 rows of 128 bytes, as those of the gated delta rule (blocks.h), where the decay is one for all
// channels and goes to the side of the results: here it has to go to the operands. Tokens after the end of the request have
// keys, queries and betas of 0, and decays of 1.
#pragma once
#include "../rules.h"
#include "blocks.h"

namespace flashinfer {
namespace recurrent {

/// Arguments; `g`, `beta` and `segment` of the base are not used. A request whose slot is negative is padding: its outputs
/// are 0, and no state is touched.
template <typename T>
struct KdaParams : DeltaParams<T> {
  const T* gates = nullptr;     // [token, num_heads, DIM]
  const void* betas = nullptr;  // [token, num_heads], float or T
  bool betas_are_float = false;
  const float* a_log = nullptr;   // [num_heads]; null: 0
  const void* dt_bias = nullptr;  // [num_heads, DIM], float or T; null: 0
  bool bias_is_float = false;
  KimiDeltaRule::Gate gate = KimiDeltaRule::Gate::kLogDecay;
  float lower_bound = 0.f;
  bool beta_is_logit = false, normalise = false;
};

constexpr int KDA_QUERIES_AT = 2 * SLAB_BYTES, KDA_ADDED_AT = 4 * SLAB_BYTES, KDA_MATRICES_AT = 6 * SLAB_BYTES;
constexpr int KDA_LISTS_AT = KDA_MATRICES_AT + 2 * SLAB_BYTES;
constexpr int KDA_BETAS_AT = DIM * int(sizeof(float));  // in the lists
constexpr int KDA_SLOWEST_AT = KDA_BETAS_AT + LIST_BYTES;
constexpr int KDA_LISTS_BYTES = KDA_SLOWEST_AT + 16;
constexpr int KDA_BLOCK_BYTES = KDA_LISTS_AT + KDA_LISTS_BYTES;

/// Return the bytes of all blocks of a call.
FLASHINFER_HD constexpr int64_t BytesOfKdaBlocks(int64_t requests, int64_t tokens, int64_t heads) {
  return FirstChunkSlot(requests, tokens) * heads * KDA_BLOCK_BYTES;
}

/// Compute outputs, final states and checkpoints of all requests; there is at least one token (chunk_sm90/kda_launch.cuh).
template <typename T>
Status KdaPrefill(const KdaParams<T>& p, Stream stream);

}  // namespace recurrent
}  // namespace flashinfer
