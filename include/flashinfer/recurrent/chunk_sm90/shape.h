// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90: shared memory and barriers (kernel.cuh has the overview).
//
// A stage has a chunk: keys and queries (64 tokens x 128, two slabs each), values (a slab of 64 columns for each consumer
// warpgroup), and the block that the first kernel has prepared (chunk/blocks.h), which arrives as one piece.
#pragma once
#include "../../hopper/ring.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../chunk/kda_blocks.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

constexpr int WARPGROUP = 128;
constexpr int HALF = DIM / 2;  // columns of the values, rows of the state, that a warpgroup has

constexpr int OUTPUT_BOX_BYTES = CHUNK * 16 * 2;  // outputs of a warp: 64 tokens x 16 columns

/// Named barriers.
enum Barrier : int {
  kCleared = 1,  // all consumers: keys after the end of the request are zero
};

/// WARPGROUPS: consumer warpgroups of a block, 2 for a whole head, 1 for half of one.
template <int WARPGROUPS_>
struct Shape {
  static constexpr int WARPGROUPS = WARPGROUPS_;
  static constexpr int CONSUMERS = WARPGROUPS * WARPGROUP;
  static constexpr int THREADS = CONSUMERS + WARPGROUP;
  static constexpr int STAGES = 3;
  static constexpr int PRODUCER_REGISTERS = 24;
  static constexpr int CONSUMER_REGISTERS = 240;

  static constexpr bool CHANNEL_DECAY = false;
  static constexpr int KEYS_AT = 0, ADDED_AT = 0;
  static constexpr int QUERIES_AT = 2 * SLAB_BYTES;
  static constexpr int VALUES_AT = 4 * SLAB_BYTES;
  static constexpr int BLOCK_AT = VALUES_AT + WARPGROUPS * SLAB_BYTES;
  static constexpr int LOADED_BYTES = BLOCK_AT + BLOCK_BYTES;
  static constexpr int STAGE_BYTES =
      (LOADED_BYTES + hopper::SLAB_ALIGNMENT - 1) / hopper::SLAB_ALIGNMENT * hopper::SLAB_ALIGNMENT;
  static constexpr int OUTPUT_AT = STAGES * STAGE_BYTES;
  static constexpr int BARRIERS_AT = OUTPUT_AT + WARPGROUPS * SLAB_BYTES;
  static constexpr int BYTES = BARRIERS_AT + 2 * STAGES * 8 + hopper::SLAB_ALIGNMENT;
  static constexpr int LISTS_AT = BLOCK_AT + BLOCK_DECAYS_AT, LISTS_STRIDE = STAGE_BYTES;
  static_assert(BYTES <= 232448, "shared memory of a block");
};

/// The same for decays of channels (chunk/kda_blocks.h): a stage has the block, then values. Lists of all stages follow the
/// outputs: stages are multiples of 1024 bytes, and with them three would not fit.
template <int WARPGROUPS_>
struct KdaShape {
  static constexpr int WARPGROUPS = WARPGROUPS_;
  static constexpr int CONSUMERS = WARPGROUPS * WARPGROUP;
  static constexpr int THREADS = CONSUMERS + WARPGROUP;
  static constexpr int STAGES = WARPGROUPS == 1 ? 3 : 2;
  static constexpr int PRODUCER_REGISTERS = 24;
  static constexpr int CONSUMER_REGISTERS = 240;

  static constexpr bool CHANNEL_DECAY = true;
  static constexpr int KEYS_AT = 0, QUERIES_AT = KDA_QUERIES_AT, ADDED_AT = KDA_ADDED_AT, BLOCK_AT = KDA_MATRICES_AT;
  static constexpr int VALUES_AT = KDA_LISTS_AT;
  static constexpr int STAGE_BYTES = VALUES_AT + WARPGROUPS * SLAB_BYTES;
  static constexpr int LOADED_BYTES = STAGE_BYTES + KDA_LISTS_BYTES;
  static constexpr int OUTPUT_AT = STAGES * STAGE_BYTES;
  static constexpr int LISTS_AT = OUTPUT_AT + WARPGROUPS * SLAB_BYTES, LISTS_STRIDE = KDA_LISTS_BYTES;
  static constexpr int BARRIERS_AT = LISTS_AT + STAGES * LISTS_STRIDE;
  static constexpr int BYTES = BARRIERS_AT + 2 * STAGES * 8;  // dynamic memory is aligned to 1024 here
  static_assert(BYTES <= 232448, "shared memory of a block");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Addresses in shared memory.
template <typename Shape>
struct Shared {
  uint32_t base;  // aligned to 1024

  __device__ __forceinline__ uint32_t Keys(int stage) const { return Stage(stage) + Shape::KEYS_AT; }
  __device__ __forceinline__ uint32_t Added(int stage) const { return Stage(stage) + Shape::ADDED_AT; }
  __device__ __forceinline__ uint32_t Queries(int stage) const { return Stage(stage) + Shape::QUERIES_AT; }
  __device__ __forceinline__ uint32_t Values(int stage, int group) const {
    return Stage(stage) + Shape::VALUES_AT + group * SLAB_BYTES;
  }
  __device__ __forceinline__ uint32_t Block(int stage) const { return Stage(stage) + Shape::BLOCK_AT; }
  __device__ __forceinline__ uint32_t Lists(int stage) const {
    return base + Shape::LISTS_AT + stage * Shape::LISTS_STRIDE;
  }
  __device__ __forceinline__ uint32_t Output(int group) const { return base + Shape::OUTPUT_AT + group * SLAB_BYTES; }
  __device__ __forceinline__ hopper::Ring<Shape::STAGES> Ring() const { return {base + Shape::BARRIERS_AT}; }

 private:
  __device__ __forceinline__ uint32_t Stage(int stage) const { return base + stage * Shape::STAGE_BYTES; }
};

/// Work of a block: some chunks of a request, a head, and the first row of its state.
struct Item {
  Request tokens;  // tokens of the request, or of a part of it
  int64_t passed;  // tokens of the request before these
  int number;      // index of the request
  int head;
  int column;
  States initial, final;
  int64_t initial_slot, final_slot;

  __device__ __forceinline__ int Chunks() const { return int((tokens.length + CHUNK - 1) / CHUNK); }
};

/// Return the work of this block: a whole request.
template <typename Shape, typename Params>
__device__ __forceinline__ Item ItemOf(const Params& p) {
  constexpr int PARTS = 2 / Shape::WARPGROUPS;
  const int part = int(blockIdx.x) % PARTS, rest = int(blockIdx.x) / PARTS, number = rest / p.num_heads;
  const int64_t slot = p.slots[number];
  return {p.RequestOf(number), 0, number, rest % p.num_heads, part * HALF, p.initial, p.final, slot, slot};
}

#endif

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
