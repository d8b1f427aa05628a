// SPDX-License-Identifier: Apache-2.0
// Shape of the prefill kernel (kernel.cuh): rows, keys and columns of each warp, and the shared-memory budget.
#pragma once
#include "../common/mask_bits.cuh"
#include "../common/tile.cuh"

namespace flashinfer {
namespace attention {
namespace prefill {

template <typename Params_, int TILE_>
struct Traits {
  using Params = Params_;
  using T = typename Params::DTypeQ;
  using KV = SharedKV<Params>;
  static constexpr int TILE = TILE_;
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr bool FP8 = IS_FP8<KV>;
  static constexpr int COLUMN_WARPS = TILE == DECODE_TILE ? 4 : (D_VO <= 256 ? 1 : 2);
  static constexpr int M_TILES = TILE == LARGE_PREFILL_TILE && D_VO <= 128 ? 2 : 1;
  static constexpr int ROW_WARPS = TILE / (16 * M_TILES);
  static constexpr int WARPS = ROW_WARPS * COLUMN_WARPS, THREADS = WARPS * 32;
  static constexpr int WARP_COLUMNS = (D_VO / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS * 16;  // value columns per warp
  using KLayout = RowLayout<D_QK* int(sizeof(KV))>;
  using VLayout = std::conditional_t<Params::SHARED_KV, KLayout, RowLayout<D_VO* int(sizeof(KV))>>;
  using QLayout = RowLayout<D_QK* int(sizeof(T))>;
  using OLayout = RowLayout<D_VO* int(sizeof(T))>;
  static constexpr int Q_BYTES = TILE * (QLayout::PITCH > OLayout::PITCH ? QLayout::PITCH : OLayout::PITCH);
  static constexpr int ROW_BYTES = KLayout::PITCH + (Params::SHARED_KV ? 0 : VLayout::PITCH);
  static constexpr int CLASS_BYTES = MaskClasses::BYTES;
  // Buffers of warps that share rows: weights of up to 64 keys, and one number per row.
  static constexpr int WEIGHT_BYTES = COLUMN_WARPS > 1 ? ROW_WARPS * M_TILES * 4 * 512 : 0,
                       TOP_BYTES = COLUMN_WARPS > 1 ? WARPS * M_TILES * 16 * 4 : 0;
  static constexpr int FIXED = Q_BYTES + WEIGHT_BYTES + TOP_BYTES + CLASS_BYTES + 128 * int(sizeof(RowOffsets<Params>));
  // Keys per step: as many as let two blocks of 4 warps share an SM if that is at least 32, otherwise as many as one
  // block can hold.
  static constexpr int BUDGET =
      (THREADS == 128 && TILE != DECODE_TILE ? device::SharedLimit() / 2 - 1024 : device::SharedLimit()) - FIXED;
  static constexpr int ROOM = BUDGET >= 64 * ROW_BYTES ? BUDGET : device::SharedLimit() - FIXED;
  static constexpr int Keys(int fit) { return fit >= 64 ? 64 : (fit >= 32 ? 32 : (fit >= 16 ? 16 : 0)); }
  // Single buffering where it allows larger steps: keys are copied while values are used, and the other way round.
  static constexpr bool ALTERNATES = !Params::SHARED_KV && Keys(ROOM / ROW_BYTES) > Keys(ROOM / (2 * ROW_BYTES));
  static constexpr int STAGES = ALTERNATES ? 1 : 2, KEYS = Keys(ROOM / (STAGES * ROW_BYTES));
  static_assert(KEYS > 0, "heads this large do not fit into shared memory");
  // Warps that share rows each compute the scores of a part of the keys, unless there are too few.
  static constexpr bool SPLITS_KEYS = COLUMN_WARPS > 1 && KEYS % (16 * COLUMN_WARPS) == 0;
  static constexpr int KEYS_WARP = SPLITS_KEYS ? KEYS / COLUMN_WARPS : KEYS;
  static_assert(THREADS >= KEYS, "a thread follows each row of a step");
  static constexpr int K_BYTES = KEYS * KLayout::PITCH, V_BYTES = Params::SHARED_KV ? 0 : KEYS * VLayout::PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int OFFSET_BYTES = 2 * KEYS * int(sizeof(RowOffsets<Params>));  // row offsets of the next two steps
  static constexpr int SHARED_BYTES =
      Q_BYTES + STAGES * STAGE_BYTES + OFFSET_BYTES + CLASS_BYTES + WEIGHT_BYTES + TOP_BYTES;
  static_assert(SHARED_BYTES <= device::SharedLimit(), "it was made to fit");
  static constexpr bool QUERY_STAYS =
      M_TILES == 2 && D_QK <= 64 && !FP8 && !CHANGES_KEYS<Params>;  // the query stays in registers
  static constexpr int BLOCKS_PER_SM = THREADS == 128 && SHARED_BYTES <= device::SharedLimit() / 2 - 1024 ? 2 : 1;
};

}  // namespace prefill
}  // namespace attention
}  // namespace flashinfer
