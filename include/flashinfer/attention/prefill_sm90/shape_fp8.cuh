// SPDX-License-Identifier: Apache-2.0
// Shape of the Hopper prefill kernel for e4m3 queries, keys and values: the members of Traits (shape.cuh).
//
// wgmma reads 8-bit operands K-major only. Queries and keys are: a row of a slab has 128 columns. Values are transposed
// on the way (producer_transpose.cuh): tiles of values have a row of 128 bytes for each output column, with the keys
// of a step in it. Keys, and values before that, arrive by TMA where strides and pages allow it and a step has 128 keys
// (IS_BOXED), otherwise by cp.async.
//
// Precision. Tensor cores keep 13 fraction bits of 8-bit sums (H200): a product of 32 keys adds an error below 2^-13 of
// the largest sum so far. Sums of SUM_STEPS steps are therefore added in fp32, in shared memory: outputs are off by at most
// 2048 / 32 * 2^-13 = 2^-7 of the largest sum, however many keys there are. Where shared memory has no room for that (256
// columns), outputs of n keys are off by at most n / 32 * 2^-13 of the largest partial sum.
#pragma once
#include <cuda_fp8.h>

#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

/// True if tiles of these heads can arrive by TMA: each warp of the producer then has 32 keys of a step.
constexpr bool HasBoxesFp8(int head_dim_qk, int head_dim_vo) {
  return head_dim_vo <= 128 && PrefillTileSm90(head_dim_qk, head_dim_vo) == 128;
}

template <typename Params_, bool PAGED_, bool IS_BOXED_>
struct Fp8Traits {
  using Params = Params_;
  using T = typename Params::DTypeQ;
  using Query = T;
  using W = T;
  static constexpr bool SCALES_QUERY = false;
  static_assert(std::is_same_v<T, __nv_fp8_e4m3> && std::is_same_v<typename Params::DTypeKV, T>,
                "queries, keys and values of e4m3");
  static constexpr Loading LOADING = Loading::kTranspose;
  static constexpr bool PAGED = PAGED_, MAY_BE_SINGLE = !PAGED, CONVERTS = false, TRANSPOSES = true;
  static constexpr bool IS_BOXED = IS_BOXED_, GATHERS = !IS_BOXED;
  static constexpr bool ZEROES_ROWS = true;  // cp.async or the transposition zeroes values behind the last key
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr int QK_SLABS = (D_QK + 127) / 128, LANDING_SLABS = (D_VO + 127) / 128;
  static constexpr int VO_SLABS = (D_VO + 63) / 64;  // slabs of 16-bit results

  static constexpr int TILE = PrefillTileSm90(D_QK, D_VO), CONSUMERS = TILE / 64;
  static constexpr int BLOCKS = 1, THREADS = (1 + CONSUMERS) * WARPGROUP, CONSUMER_WARPS = CONSUMERS * 4,
                       PRODUCER_WARPS = 4;
  static constexpr int ISSUERS = 4, FILL_ARRIVALS = IS_BOXED ? ISSUERS : WARPGROUP, VALUE_ARRIVALS = 4;
  static constexpr bool IS_PING_PONG = false;

  static constexpr bool HAS_STAGES = IS_BOXED && QK_SLABS == 1;  // room for more than two stages of a ring
  static constexpr int STAGES = 2, LANDINGS = 2, NOTES_BYTES = 0;
  static constexpr int SHARED_LIMIT = 227 * 1024, BARRIER_BYTES = 256, ITEM_BYTES = sizeof(WorkItem);
  static constexpr int WARP_STAGING = 16 * hopper::SLAB_ROW_BYTES;
  // Keys per step: the keys of a row of transposed values. Beside more than 128 output columns, and for three consumers,
  // the registers hold 64.
  static constexpr int KEYS = D_VO > 128 || CONSUMERS == 3 ? 64 : 128, BOX_KEYS = IS_BOXED ? 32 : KEYS;
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 80 : (IS_BOXED ? 88 : 72);
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 144 : (IS_BOXED ? 208 : 216);
  static constexpr int Q_BYTES = QK_SLABS * TILE * hopper::SLAB_ROW_BYTES;
  static constexpr int K_BYTES = QK_SLABS * KEYS * hopper::SLAB_ROW_BYTES, V_BYTES = D_VO * hopper::SLAB_ROW_BYTES;
  static constexpr int LANDING_BYTES = LANDING_SLABS * KEYS * hopper::SLAB_ROW_BYTES;
  // Four stages of keys where they fit: with two, keys arrive later than they are wanted.
  static constexpr int KEY_STAGES = HAS_STAGES ? 4 : 2;
  /// Queries stay in the registers of the consumers: products read a third less of shared memory.
  static constexpr bool HOLDS_QUERY = KEYS == 128 && QK_SLABS == 1;
  static constexpr bool STAGES_IN_QUERY = false;
  static constexpr int STAGING_BYTES = CONSUMER_WARPS * WARP_STAGING;
  static constexpr int K_OFFSET = Q_BYTES, V_OFFSET = K_OFFSET + KEY_STAGES * K_BYTES;
  static constexpr int LANDING_OFFSET = V_OFFSET + STAGES * V_BYTES;
  static constexpr int STAGING_OFFSET = LANDING_OFFSET + LANDINGS * LANDING_BYTES;
  static constexpr int BARRIER_OFFSET = STAGING_OFFSET + STAGING_BYTES, ITEM_OFFSET = BARRIER_OFFSET + BARRIER_BYTES;
  static constexpr int NOTES_OFFSET = ITEM_OFFSET + 2 * ITEM_BYTES, SUMS_OFFSET = NOTES_OFFSET;
  static constexpr int SUMS_BYTES = TILE * D_VO * int(sizeof(float));
  static constexpr int SUM_STEPS = hopper::SLAB_ALIGNMENT + SUMS_OFFSET + SUMS_BYTES <= SHARED_LIMIT ? 2048 / KEYS : 0;
  static constexpr int SHARED_BYTES = hopper::SLAB_ALIGNMENT + SUMS_OFFSET + (SUM_STEPS > 0 ? SUMS_BYTES : 0);
  static_assert(SHARED_BYTES <= SHARED_LIMIT, "heads this large do not fit into shared memory");
  static_assert(D_QK % 32 == 0, "products of 32 columns");
};

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
