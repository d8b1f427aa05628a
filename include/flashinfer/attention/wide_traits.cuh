// SPDX-License-Identifier: Apache-2.0
// Shape of the kernel in wide.cuh: who has which rows, keys and columns, and what fits into shared memory.
#pragma once
#include "mask_bits.cuh"
#include "tile.cuh"

namespace flashinfer {
namespace attention {
namespace wide {

template <typename Params_, int TILE_>
struct Traits {
  using Params = Params_;
  using T = typename Params::DTypeQ;
  using KV = SharedKV<Params>;
  static constexpr int TILE = TILE_;
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr bool FP8 = IS_FP8<KV>;
  static constexpr int WD = TILE == NARROW_TILE ? 4 : (D_VO <= 256 ? 1 : 2);
  static constexpr int MT = TILE == WIDEST_TILE && D_VO <= 128 ? 2 : 1;
  static constexpr int WM = TILE / (16 * MT);
  static constexpr int WARPS = WM * WD, THREADS = WARPS * 32;
  static constexpr int D_WARP = (D_VO / 16 + WD - 1) / WD * 16;  // value columns of a warp
  using KLayout = RowLayout<D_QK* int(sizeof(KV))>;
  using VLayout = std::conditional_t<Params::SHARED_KV, KLayout, RowLayout<D_VO* int(sizeof(KV))>>;
  using QLayout = RowLayout<D_QK* int(sizeof(T))>;
  using OLayout = RowLayout<D_VO* int(sizeof(T))>;
  static constexpr int Q_BYTES = TILE * (QLayout::PITCH > OLayout::PITCH ? QLayout::PITCH : OLayout::PITCH);
  static constexpr int ROW_BYTES = KLayout::PITCH + (Params::SHARED_KV ? 0 : VLayout::PITCH);
  static constexpr int CLASS_BYTES = MaskClasses::BYTES;
  // What warps that share rows exchange: weights of up to 64 keys, a number per row.
  static constexpr int WEIGHT_BYTES = WD > 1 ? WM * MT * 4 * 512 : 0, TOP_BYTES = WD > 1 ? WARPS * MT * 16 * 4 : 0;
  static constexpr int FIXED = Q_BYTES + WEIGHT_BYTES + TOP_BYTES + CLASS_BYTES + 128 * int(sizeof(RowOffsets<Params>));
  // Keys of a step: what lets two blocks of 4 warps share an SM if those are at least 32, else what one block can have.
  static constexpr int BUDGET =
      (THREADS == 128 && TILE != NARROW_TILE ? SharedLimit() / 2 - 1024 : SharedLimit()) - FIXED;
  static constexpr int ROOM = BUDGET >= 64 * ROW_BYTES ? BUDGET : SharedLimit() - FIXED;
  static constexpr int Keys(int fit) { return fit >= 64 ? 64 : (fit >= 32 ? 32 : (fit >= 16 ? 16 : 0)); }
  // Where more keys fit once than twice, keys are copied while values are used and the other way round.
  static constexpr bool ALTERNATES = !Params::SHARED_KV && Keys(ROOM / ROW_BYTES) > Keys(ROOM / (2 * ROW_BYTES));
  static constexpr int STAGES = ALTERNATES ? 1 : 2, KEYS = Keys(ROOM / (STAGES * ROW_BYTES));
  static_assert(KEYS > 0, "heads this large do not fit into shared memory");
  // Warps that share rows compute the scores of a part of the keys each, unless those are too few.
  static constexpr bool SHARES = WD > 1 && KEYS % (16 * WD) == 0;
  static constexpr int KEYS_WARP = SHARES ? KEYS / WD : KEYS;
  static_assert(THREADS >= KEYS, "a thread follows each row of a step");
  static constexpr int K_BYTES = KEYS * KLayout::PITCH, V_BYTES = Params::SHARED_KV ? 0 : KEYS * VLayout::PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int OFFSET_BYTES = 2 * KEYS * int(sizeof(RowOffsets<Params>));  // of the rows of the next two steps
  static constexpr int SHARED_BYTES =
      Q_BYTES + STAGES * STAGE_BYTES + OFFSET_BYTES + CLASS_BYTES + WEIGHT_BYTES + TOP_BYTES;
  static_assert(SHARED_BYTES <= SharedLimit(), "it was made to fit");
  static constexpr bool QUERY_STAYS = MT == 2 && D_QK <= 64 && !FP8 && !CHANGES_KEYS<Params>;  // in registers
  static constexpr int BLOCKS_PER_SM = THREADS == 128 && SHARED_BYTES <= SharedLimit() / 2 - 1024 ? 2 : 1;
};

}  // namespace wide
}  // namespace attention
}  // namespace flashinfer
