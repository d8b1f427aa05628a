// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90: sizes, shared memory and barriers (kernel.cuh has the overview).
#pragma once
#include "../../hopper/ring.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../mqa_logits.h"

namespace flashinfer {
namespace indexer {
namespace sm90 {

constexpr int KEYS = 64;  // keys of a tile, the M side of a product
constexpr int TILES = SPLIT / KEYS;
constexpr int WARPGROUP = 128;
constexpr int LOADER_WARPS = 3;  // warps of the producer that load queries and weights; the first warp loads keys
constexpr int FILL_LANES = 4;    // lanes of the warp of keys that load a tile each
constexpr int MIN_BLOCK = 32;    // keys of the smallest page
constexpr int QUERY_STAGES = 2;
constexpr int SHARED_LIMIT = 232448;

/// Widths of products, largest first, that a module may use.
constexpr int WIDTHS[] = {64, 48, 32, 16, 8};

/// Return the largest of WIDTHS that divides `columns`.
constexpr int WidthOf(int columns) {
  for (const int width : WIDTHS) {
    if (columns % width == 0) return width;
  }
  return 0;
}

/// Sizes of a module: HEADS heads of DIM bytes in NEXT_N slots, and warpgroups that multiply.
template <int HEADS_, int DIM_, int NEXT_N_, int CONSUMERS_ = 4>
struct Shape {
  static constexpr int HEADS = HEADS_, DIM = DIM_, NEXT_N = NEXT_N_, CONSUMERS = CONSUMERS_;
  static constexpr int COLUMNS = HEADS * NEXT_N;  // the N side of a product: heads of all slots
  static constexpr int WIDTH = WidthOf(COLUMNS);  // columns of one product
  static constexpr int PASSES = COLUMNS / WIDTH;  // products that a tile needs one after the other
  static constexpr int SLABS = DIM / hopper::SLAB_ROW_BYTES;
  static constexpr int TILE_BYTES = KEYS * DIM;
  static constexpr int QUERY_BYTES =
      (COLUMNS * DIM + hopper::SLAB_ALIGNMENT - 1) / hopper::SLAB_ALIGNMENT * hopper::SLAB_ALIGNMENT;
  static constexpr int QUERY_SLAB_BYTES = COLUMNS * hopper::SLAB_ROW_BYTES;
  static constexpr int WEIGHT_BYTES = COLUMNS * int(sizeof(float));
  static constexpr int SCALE_BYTES = KEYS * int(sizeof(float));
  static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
  /// Registers of the consumers. Weights stay in registers where there is room for them.
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 4 ? 64 : 56;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 104 : CONSUMERS == 3 ? 144 : 208;
  static constexpr bool HOLDS_WEIGHTS = COLUMNS <= 64;

  static constexpr int FIXED_BYTES = QUERY_STAGES * (QUERY_BYTES + WEIGHT_BYTES) + hopper::SLAB_ALIGNMENT + 1024;
  static constexpr int FITTING = (SHARED_LIMIT - FIXED_BYTES) / (TILE_BYTES + SCALE_BYTES);
  /// Tiles in flight; each stage always belongs to the same warpgroup.
  static constexpr int STAGES = (FITTING < 16 ? FITTING : 16) / CONSUMERS * CONSUMERS;

  static_assert(DIM % hopper::SLAB_ROW_BYTES == 0 && COLUMNS % 8 == 0 && COLUMNS <= 256 && HEADS % 4 == 0, "shape");
  static_assert(STAGES >= CONSUMERS && STAGES >= FILL_LANES, "shared memory of a block");
  static_assert(TILES % FILL_LANES == 0, "page ids of the tiles that lanes load are held together");
};

/// Memory of a block. `base` is the shared address, aligned to 1024, and `memory` the same as a pointer.
template <typename Shape>
struct Shared {
  static constexpr int QUERIES_AT = Shape::STAGES * Shape::TILE_BYTES;
  static constexpr int SCALES_AT = QUERIES_AT + QUERY_STAGES * Shape::QUERY_BYTES;
  static constexpr int WEIGHTS_AT = SCALES_AT + Shape::STAGES * Shape::SCALE_BYTES;
  static constexpr int BARRIERS_AT = (WEIGHTS_AT + QUERY_STAGES * Shape::WEIGHT_BYTES + 7) / 8 * 8;
  static constexpr int BYTES = BARRIERS_AT + 2 * (Shape::STAGES + QUERY_STAGES) * 8 + hopper::SLAB_ALIGNMENT;
  static_assert(BYTES <= SHARED_LIMIT, "shared memory of a block");

  uint32_t base;
  char* memory;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ uint32_t Tile(int stage) const { return base + stage * Shape::TILE_BYTES; }
  __device__ __forceinline__ uint32_t Scales(int stage) const { return base + SCALES_AT + stage * Shape::SCALE_BYTES; }
  __device__ __forceinline__ const float* ScalesOf(int stage) const {
    return reinterpret_cast<const float*>(memory + SCALES_AT + stage * Shape::SCALE_BYTES);
  }
  __device__ __forceinline__ uint32_t Query(int stage) const { return base + QUERIES_AT + stage * Shape::QUERY_BYTES; }
  __device__ __forceinline__ uint32_t Weights(int stage) const {
    return base + WEIGHTS_AT + stage * Shape::WEIGHT_BYTES;
  }
  __device__ __forceinline__ const float* WeightsOf(int stage) const {
    return reinterpret_cast<const float*>(memory + WEIGHTS_AT + stage * Shape::WEIGHT_BYTES);
  }
  __device__ __forceinline__ hopper::Ring<Shape::STAGES> Keys() const {
    return hopper::Ring<Shape::STAGES>{base + BARRIERS_AT};
  }
  __device__ __forceinline__ hopper::Ring<QUERY_STAGES> Queries() const {
    return hopper::Ring<QUERY_STAGES>{base + BARRIERS_AT + 2 * Shape::STAGES * 8};
  }
#endif
};

}  // namespace sm90
}  // namespace indexer
}  // namespace flashinfer
