// SPDX-License-Identifier: Apache-2.0
// Blocks that the first kernel (prepare.cuh) writes to global memory for the second, one per chunk slot and head:
//
//   T   64 x 64, 16 bits  (I + A)^-1 - I, with A[i][j] = beta_i e^(G_i - G_j) k_i.k_j for i > j
//   P   64 x 64, 16 bits  scale e^(G_i - G_j) q_i.k_j for i >= j, 0 above
//   eG  64 floats         e^(G_i): decay of the state from the start of the chunk to token i
//   eR  64 floats         e^(G_63 - G_i): decay from token i to the end of the chunk
//   b   64 floats         beta_i
//   bG  64 floats         beta_i e^(G_i)
//
// The matrices are slabs of 64 rows of 128 bytes with the 128-byte swizzle (hopper/smem_tile.cuh). T goes without
// its diagonal of ones: U = X + X (T - I)^T, whose first term need not be rounded. Tokens after the end of the request have
// keys, queries and betas of 0, and decays of 1.
#pragma once
#include "params.h"

namespace flashinfer {
namespace recurrent {

constexpr int SLAB_BYTES = CHUNK * 128;  // 64 tokens of 64 numbers of 16 bits
constexpr int BLOCK_P_AT = SLAB_BYTES;
constexpr int BLOCK_DECAYS_AT = 2 * SLAB_BYTES;
enum List { kFromStart, kToEnd, kBeta, kBetaFromStart, LISTS };
constexpr int LIST_BYTES = CHUNK * int(sizeof(float));
constexpr int BLOCK_BYTES = BLOCK_DECAYS_AT + LISTS * LIST_BYTES;

/// Return the bytes of all blocks of a call.
FLASHINFER_HD constexpr int64_t BytesOfBlocks(int64_t requests, int64_t tokens, int64_t heads) {
  return FirstChunkSlot(requests, tokens) * heads * BLOCK_BYTES;
}

/// Return the bytes of the states of parts of `segment` tokens: three for each part and head (chunk_sm90/split.cuh).
constexpr int PART_STATES = 3;
FLASHINFER_HD constexpr int64_t BytesOfParts(int64_t requests, int64_t tokens, int64_t heads, int64_t segment) {
  if (segment == 0) return 0;
  return PART_STATES * FirstChunkSlot(requests, tokens, segment) * heads * DIM * DIM * int64_t(sizeof(float));
}

}  // namespace recurrent
}  // namespace flashinfer
