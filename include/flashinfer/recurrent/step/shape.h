// SPDX-License-Identifier: Apache-2.0
// Tile of the step kernel, and what its blocks keep in shared memory.
#pragma once
#include <cstdint>

#include "../../host_device.h"

namespace flashinfer {
namespace recurrent {
namespace step {

/// Abilities of the kernel for several tokens (one token: one.cuh); less of them takes fewer registers and less code.
enum class Form {
  kMany,  ///< up to TOKENS tokens, vectors everywhere, states after each token or after the last, nothing else kept
  kAny,   ///< any number of tokens and everything of StepParams
};

constexpr int COLUMNS = 8;            // lanes that share a row of the state: a row of fp32 is read 128 bytes at a time
constexpr int GROUPS = 32 / COLUMNS;  // rows that a warp handles at once
constexpr int WARPS = 4;
constexpr int MANY = 8;  // tokens that fit into shared memory
constexpr int THREADS = 32 * WARPS;

/// ROWS: rows that a lane has in registers at once, all of which are loaded before the first is needed.
template <int K_, int ROWS_, Form FORM_>
struct Shape {
  static constexpr int K = K_, ROWS = ROWS_;
  static constexpr Form FORM = FORM_;
  static constexpr int TOKENS = MANY;                 // in shared memory at once
  static constexpr int TILE = WARPS * GROUPS * ROWS;  // rows of a block
  static constexpr int ELEMENTS = K / COLUMNS;        // elements of a row in one lane
};

/// Blocks for which an SM must have registers: as many as need no spills.
template <typename Rule, typename Shape>
constexpr int BLOCKS = Shape::FORM == Form::kAny ? (Shape::K > 128 ? 2 : 3) : (Rule::CHANNEL_DECAY ? 3 : 4);

/// Tokens of one head, ready to be applied: k and q normalised and scaled, their elements in the order of Position.
template <typename Rule, typename Shape>
struct Shared {
  alignas(16) float k[Shape::TOKENS][Shape::K];
  alignas(16) float q[Shape::TOKENS][Shape::K];
  alignas(16) float decay[Shape::TOKENS][Rule::CHANNEL_DECAY ? Shape::K : 4];
  float v[Shape::TOKENS][Shape::TILE];
  float beta[Shape::TOKENS], kq[Shape::TOKENS];  // kq: dot(k, q)
  float log_decay[Shape::TOKENS];                // rules with one decay per head
};

/// Place in shared memory of element e of k and q. Lane c of a row has, for each VEC elements that it loads of the
/// state, VEC / 4 vectors of four floats here; the eight lanes of a row read 128 neighbouring bytes each time.
template <int VEC>
FLASHINFER_HD constexpr int Position(int e) {
  constexpr int WIDE = VEC * COLUMNS;
  return e / WIDE * WIDE + e % VEC / 4 * (4 * COLUMNS) + e % WIDE / VEC * 4 + e % 4;
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
