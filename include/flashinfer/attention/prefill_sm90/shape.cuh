// SPDX-License-Identifier: Apache-2.0
// Shape of the Hopper prefill kernel (kernel.cuh): roles, tiles, registers and shared memory.
//
// Tiles lie in shared memory as slabs of 64 columns (hopper/smem_tile.cuh): a row of a slab is 128 bytes, swizzled.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../../hopper/ring.cuh"
#include "../../hopper/roles.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/wgmma.cuh"
#include "../common/backend_interface.h"
#include "../common/convert.cuh"
#include "tiles.h"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

using hopper::WARPGROUP;

/// Keys per step of Form::kShort: fewer waste less at the diagonal, and items of it are short.
constexpr int SHORT_KEYS = 64;

template <typename T>
inline constexpr ptx::WgmmaType WGMMA_TYPE = sizeof(T) == 1              ? ptx::WgmmaType::kE4m3
                                             : std::is_same_v<T, __half> ? ptx::WgmmaType::kF16
                                                                         : ptx::WgmmaType::kBf16;

/// Path of keys and values to shared memory: by TMA, in boxes of whole tiles (kRows: ragged keys) or of parts of pages
/// (kPages), or by cp.async, row by row, from anywhere (kGather). 8-bit keys and values are converted (kConvert) or, under
/// 8-bit queries, values are transposed (kTranspose, shape_fp8.cuh).
enum class Loading { kRows, kPages, kGather, kConvert, kTranspose };

/// Shape of a block: one block of two or three consumers fills an SM (kLong), or two blocks of one consumer share it
/// (kShort). Nothing ties the blocks of an SM together, so that the ends of the items of one overlap with products of the
/// other; but each loads the keys for 64 rows only. kShort is for items of few keys.
enum class Form { kLong, kShort };

template <typename Params_, Loading LOADING_, bool PAGED_ = LOADING_ == Loading::kPages, Form FORM_ = Form::kLong>
struct Traits {
  using Params = Params_;
  using Query = typename Params::DTypeQ;
  static constexpr bool CONVERTS = LOADING_ == Loading::kConvert;
  static_assert(sizeof(Query) == 2 &&
                    (CONVERTS ? IS_FP8<typename Params::DTypeKV> : std::is_same_v<Query, typename Params::DTypeKV>),
                "16-bit queries, and keys and values of the same type or of 8 bits");
  // Operands of the scores (T) and of the outputs (W). One instruction turns two 8-bit numbers into fp16, which holds them
  // exactly; bf16 takes five. Queries of bf16 are then scaled (ScaleQuery). Weights without softmax may exceed fp16.
  using T = std::conditional_t<CONVERTS, __half, Query>;
  using W = std::conditional_t<CONVERTS && Variant<false>::use_softmax, __half, Query>;
  static constexpr bool SCALES_QUERY = !std::is_same_v<T, Query>;
  static constexpr Loading LOADING = LOADING_;
  static constexpr bool PAGED = PAGED_, GATHERS = LOADING == Loading::kGather, TRANSPOSES = false;
  static constexpr bool MAY_BE_SINGLE = !PAGED;             // a list may be one request (WorkList::single_request)
  static constexpr bool ZEROES_ROWS = GATHERS || CONVERTS;  // rows behind the end of an item are 0, not what lies there
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr int QK_SLABS = (D_QK + 63) / 64, VO_SLABS = (D_VO + 63) / 64;

  // Roles: one producer warpgroup, and consumer warpgroups of 64 rows each.
  static constexpr bool IS_SHORT = FORM_ == Form::kShort;
  static_assert(!IS_SHORT || (HasShortPrefillSm90(D_QK, D_VO) && !CONVERTS), "two blocks do not fit into an SM");
  static constexpr int BLOCKS = IS_SHORT ? 2 : 1;  // blocks that share an SM
  static constexpr int TILE = IS_SHORT ? SHORT_PREFILL_TILE : PrefillTileSm90(D_QK, D_VO), CONSUMERS = TILE / 64;
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP, CONSUMER_WARPS = CONSUMERS * 4;
  // Registers per thread. The producer gives its registers to the consumers; their sum is what the launch reserved.
  static constexpr int PRODUCER_REGISTERS = CONVERTS ? 72 : (IS_SHORT ? 56 : (CONSUMERS == 2 ? 56 : 32));
  static constexpr int CONSUMER_REGISTERS =
      IS_SHORT ? 200 : (CONSUMERS == 2 ? (CONVERTS ? 216 : 224) : (CONVERTS ? 144 : 160));
  // Warps of the producer that fill a stage, and their arrivals at its barrier.
  static constexpr int ISSUERS = LOADING == Loading::kPages || CONVERTS ? 4 : 1;
  static constexpr int FILL_ARRIVALS = GATHERS ? WARPGROUP : ISSUERS, PRODUCER_WARPS = GATHERS ? 4 : ISSUERS;
  static constexpr int VALUE_ARRIVALS = FILL_ARRIVALS;
  // One warpgroup multiplies while another computes weights. Larger heads multiply long enough without taking turns.
  static constexpr bool IS_PING_PONG = D_VO <= 128 && CONSUMERS > 1;

  // Shared memory: query tile, rings of two key tiles and two value tiles, staging of results, barriers, two items.
  static constexpr int STAGES = 2, KEY_STAGES = STAGES;
  static constexpr int SHARED_LIMIT = (228 / BLOCKS - 1) * 1024, BARRIER_BYTES = 128, ITEM_BYTES = sizeof(WorkItem);
  static constexpr int NOTES_BYTES = CONVERTS ? 3 * 16 : 0;  // notes about the tiles on their way
  static constexpr int WARP_STAGING = 16 * hopper::SLAB_ROW_BYTES;
  static constexpr int Q_BYTES = QK_SLABS * TILE * hopper::SLAB_ROW_BYTES;
  static constexpr int RING_BYTES =
      STAGES * (QK_SLABS + VO_SLABS) * hopper::SLAB_ROW_BYTES;  // bytes of one key in all stages
  static constexpr int ROOM =
      SHARED_LIMIT - hopper::SLAB_ALIGNMENT - BARRIER_BYTES - 2 * ITEM_BYTES - NOTES_BYTES - Q_BYTES;
  // 8-bit tiles on their way, and the bytes of one key in each.
  static constexpr int LANDING_ROW_BYTES = CONVERTS ? (QK_SLABS > VO_SLABS ? QK_SLABS : VO_SLABS) * 64 : 0;
  static constexpr int LANDINGS = ROOM / (RING_BYTES + 3 * LANDING_ROW_BYTES) >= 64 ? 3 : 2;
  static constexpr int KEY_BYTES = RING_BYTES + LANDINGS * LANDING_ROW_BYTES;
  static constexpr int FIT = ROOM / KEY_BYTES;
  // Keys per step. Beside 256 output columns, 80 keys would fit into shared memory, but not into the registers; nor
  // would 128 keys for three consumers beside a producer that converts.
  static constexpr bool FITS_128 = FIT >= 128 && !(CONVERTS && CONSUMERS == 3);
  static constexpr int LONG_KEYS =
      D_VO > 192 ? 64 : (FITS_128 ? 128 : (FIT >= 96 ? 96 : (FIT >= 80 && !CONVERTS ? 80 : 64)));
  static constexpr int KEYS = IS_SHORT ? SHORT_KEYS : LONG_KEYS, BOX_KEYS = KEYS;  // BOX_KEYS: most keys of a box
  static_assert(KEYS <= FIT, "rings of this many keys do not fit into shared memory");
  static_assert(FIT >= 64, "heads this large do not fit into shared memory");
  static constexpr int K_BYTES = QK_SLABS * KEYS * hopper::SLAB_ROW_BYTES;
  static constexpr int V_BYTES = VO_SLABS * KEYS * hopper::SLAB_ROW_BYTES;
  /// Results are staged where the queries were if there is no other room; the next query then waits for them.
  static constexpr bool STAGES_IN_QUERY = ROOM - KEYS * KEY_BYTES < CONSUMER_WARPS * WARP_STAGING;
  static constexpr int STAGING_BYTES = STAGES_IN_QUERY ? 0 : CONSUMER_WARPS * WARP_STAGING;
  static constexpr int K_OFFSET = Q_BYTES, V_OFFSET = K_OFFSET + STAGES * K_BYTES;
  static constexpr int LANDING_BYTES = KEYS * LANDING_ROW_BYTES, LANDING_OFFSET = V_OFFSET + STAGES * V_BYTES;
  static constexpr int STAGING_OFFSET = LANDING_OFFSET + LANDINGS * LANDING_BYTES;
  static constexpr int BARRIER_OFFSET = STAGING_OFFSET + STAGING_BYTES, ITEM_OFFSET = BARRIER_OFFSET + BARRIER_BYTES;
  static constexpr int NOTES_OFFSET = ITEM_OFFSET + 2 * ITEM_BYTES;
  static constexpr int SUMS_OFFSET = 0;  // sums in registers have all bits
  static constexpr int SHARED_BYTES = hopper::SLAB_ALIGNMENT + NOTES_OFFSET + NOTES_BYTES;
  static_assert(SHARED_BYTES <= SHARED_LIMIT, "it was made to fit");
};

/// Barriers of consumer warps, plus the number of the warpgroup, below 3: of its own warps, and for its turn to multiply.
enum class NamedBarrier : int { kWarpgroup = 1, kTurn = 4 };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Position of the n-th tile in the ring of keys or of values: a count needs fewer registers than two positions.
template <int STAGES>
__device__ __forceinline__ hopper::RingPosition<STAGES> TileAt(uint32_t n) {
  static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
  return {int(n % STAGES), n / STAGES % 2};
}
template <typename Tr>
__device__ __forceinline__ hopper::RingPosition<Tr::STAGES> RingAt(uint32_t n) {
  return TileAt<Tr::STAGES>(n);
}

/// Shared memory of a block.
template <typename Tr>
struct Shared {
  using KeyRing = hopper::Ring<Tr::KEY_STAGES>;
  using ValueRing = hopper::Ring<Tr::STAGES>;
  uint32_t base;  // address of the query tile, aligned to 1024

  __device__ __forceinline__ uint32_t Query() const { return base; }
  __device__ __forceinline__ uint32_t Keys(int stage) const { return base + Tr::K_OFFSET + stage * Tr::K_BYTES; }
  __device__ __forceinline__ uint32_t Values(int stage) const { return base + Tr::V_OFFSET + stage * Tr::V_BYTES; }
  __device__ __forceinline__ uint32_t Landing(int slot) const {
    return base + Tr::LANDING_OFFSET + slot * Tr::LANDING_BYTES;
  }
  /// 16 bytes for what one thread notes about the tile in a landing place.
  __device__ __forceinline__ uint32_t Noted(int slot) const { return base + Tr::NOTES_OFFSET + slot * 16; }
  /// 16 rows of 128 bytes for the results of consumer warp `warp`.
  __device__ __forceinline__ uint32_t Staging(int warp) const {
    return base + (Tr::STAGES_IN_QUERY ? 0 : Tr::STAGING_OFFSET) + warp * Tr::WARP_STAGING;
  }
  /// Sums of all steps but the latest, 16 bytes of thread `thread` of the consumers; the next ones are TILE * 32 further.
  __device__ __forceinline__ uint32_t Sums(int thread) const { return base + Tr::SUMS_OFFSET + thread * 16; }
  __device__ __forceinline__ uint32_t Item(int stage) const { return base + Tr::ITEM_OFFSET + stage * Tr::ITEM_BYTES; }
  __device__ __forceinline__ hopper::Ring<1> QueryBarriers() const { return {base + Tr::BARRIER_OFFSET}; }
  __device__ __forceinline__ KeyRing KeyBarriers() const { return {base + Tr::BARRIER_OFFSET + 16}; }
  __device__ __forceinline__ ValueRing ValueBarriers() const {
    return {base + Tr::BARRIER_OFFSET + 16 + KeyRing::BYTES};
  }
  __device__ __forceinline__ hopper::Ring<2> ItemBarriers() const {
    return {base + Tr::BARRIER_OFFSET + 16 + KeyRing::BYTES + ValueRing::BYTES};
  }
  /// Barrier of the values of warp `warp` of the producer in a landing place (producer_transpose_boxes.cuh).
  __device__ __forceinline__ uint32_t LandingBarrier(int warp, int slot) const {
    return base + Tr::BARRIER_OFFSET + 16 + KeyRing::BYTES + ValueRing::BYTES + hopper::Ring<2>::BYTES +
           (warp * Tr::LANDINGS + slot) * 8;
  }

  /// Initialise the barriers. Called by one thread; a barrier of the block must follow.
  __device__ __forceinline__ void Init() const {
    QueryBarriers().Init(Tr::CONSUMER_WARPS);
    KeyBarriers().Init(Tr::CONSUMER_WARPS, Tr::FILL_ARRIVALS);
    ValueBarriers().Init(Tr::CONSUMER_WARPS, Tr::VALUE_ARRIVALS);
    ItemBarriers().Init(Tr::CONSUMER_WARPS + Tr::PRODUCER_WARPS);
    if constexpr (Tr::TRANSPOSES && !Tr::GATHERS) {
      for (int i = 0; i < Tr::PRODUCER_WARPS * Tr::LANDINGS; ++i) ptx::MbarrierInit(LandingBarrier(0, i), 1);
      ptx::MbarrierInitFence();
    }
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
