// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the Hopper kernel of SSD.
#pragma once
#include "../../hopper/smem_tile.cuh"
#include "../ssd.h"

namespace flashinfer {
namespace recurrent {
namespace ssd_sm90 {

constexpr int ROWS = 64, DSTATE = 128;  // rows of a head in a block; numbers of a row of the state
constexpr int STAGES = 4, STATE_STAGES = 2;
constexpr int WARPGROUP = 128, THREADS = 4 * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 56, STATE_REGISTERS = 152, OUTPUT_REGISTERS = 152;

enum NamedBarrier : int {
  kStateBarrier = 1,
  kOutputBarrier = 2
};  // kOutputBarrier and the next: one for each warpgroup

constexpr int SLAB_BYTES = SSD_CHUNK * hopper::SLAB_ROW_BYTES;  // 64 rows of 64 16-bit numbers
constexpr int TOKEN_BYTES = 5 * SLAB_BYTES;                     // X, and two slabs each of B and C

/// A chunk in shared memory, as TMA writes it.
struct Stage {
  uint8_t x[SLAB_BYTES], b[2 * SLAB_BYTES], c[2 * SLAB_BYTES];
};

}  // namespace ssd_sm90
}  // namespace recurrent
}  // namespace flashinfer
