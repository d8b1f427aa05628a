// SPDX-License-Identifier: Apache-2.0
// Columns of the tiles with tokens on the M side. Those of most tiles follow one another. A tile of 176 weights has a head of
// 128 and a tail of 48 (144 and 160 weights would have 16 and 32): heads are the first blocks of the weights in order, tails
// share the columns behind all heads. A head then has one scale for each 128 of K, where 176 columns in a row would meet three blocks of
// weights at places that differ from tile to tile, and its results fill whole lines of 128 bytes.
#pragma once
#include "../../host_device.h"
#include "problem.h"

namespace flashinfer {
namespace gemm {

template <int BLOCK_N>
struct TileColumns {
  static constexpr bool HAS_TAIL = (BLOCK_N > SCALE_BLOCK) && (BLOCK_N < SCALE_BLOCK + 64);
  static constexpr int HEAD = HAS_TAIL ? SCALE_BLOCK : BLOCK_N, TAIL = BLOCK_N - HEAD;
  static constexpr int SCALED = 16;  // columns of a tail that share a scale: tails begin at multiples of them
  static_assert(TAIL % SCALED == 0, "tails");

  /// Return the first column of tile `n_tile`.
  FLASHINFER_HD static constexpr int Head(int n_tile) { return n_tile * HEAD; }
  /// Return the first column of the tail of one of `n_tiles` tiles.
  FLASHINFER_HD static constexpr int Tail(int n_tile, int n_tiles) { return n_tiles * HEAD + n_tile * TAIL; }
};

}  // namespace gemm
}  // namespace flashinfer
