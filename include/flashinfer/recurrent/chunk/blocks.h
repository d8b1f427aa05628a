// SPDX-License-Identifier: Apache-2.0
// What the first kernel (prepare.cuh) leaves in global memory for the second, one block per chunk slot and head:
//
//   T   64 x 64, 16 bits  (I + A)^-1 diag(beta), with A[i][j] = beta_i e^(G_i - G_j) k_i.k_j for i > j
//   P   64 x 64, 16 bits  scale e^(G_i - G_j) q_i.k_j for i >= j, 0 above
//   eG  64 floats         e^(G_i): decay of the state from the start of the chunk to token i
//   eR  64 floats         e^(G_63 - G_i): decay from token i to the end of the chunk
//
// The matrices are slabs of 64 rows of 128 bytes with the 128-byte swizzle (hopper/smem_tile.cuh). Rows and columns of
// tokens after the end of the request are 0.
#pragma once
#include "params.h"

namespace flashinfer {
namespace recurrent {

constexpr int SLAB_BYTES = CHUNK * 128;  // 64 tokens of 64 numbers of 16 bits
constexpr int BLOCK_P_AT = SLAB_BYTES;
constexpr int BLOCK_DECAYS_AT = 2 * SLAB_BYTES;
constexpr int BLOCK_BYTES = BLOCK_DECAYS_AT + 2 * CHUNK * int(sizeof(float));

/// Return the bytes of all blocks of a call.
FLASHINFER_HD constexpr int64_t BytesOfBlocks(int64_t requests, int64_t tokens, int64_t heads) {
  return FirstChunkSlot(requests, tokens) * heads * BLOCK_BYTES;
}

}  // namespace recurrent
}  // namespace flashinfer
