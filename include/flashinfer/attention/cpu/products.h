// SPDX-License-Identifier: Apache-2.0
// q.k and p.v of a tile in floats: keys (transposed) and values are converted block by block into scratch memory that
// stays in the cache, whatever their storage type.
#pragma once
#include <algorithm>
#include <utility>

#include "load.h"
#include "../variants.h"

namespace flashinfer {
namespace attention {

/// Bump allocator of scratch memory, in whole registers.
class ScratchCursor {
 public:
  explicit ScratchCursor(float* at) : at_(at) {}
  float* Take(int64_t floats) { return std::exchange(at_, at_ + Round(floats)); }
  static constexpr int64_t Round(int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  float* at_;
};

/// Return true if a variant does not transform queries (or keys): it inherits the default hook.
template <typename Params>
using OperandHook = float (AttentionVariantBase::*)(const Params&, float);
template <typename Params, typename Variant>
constexpr bool KeepsQueries() {
  return std::is_same_v<decltype(&Variant::template QueryTransform<Params, float>), OperandHook<Params>>;
}
template <typename Params, typename Variant>
constexpr bool KeepsKeys() {
  return std::is_same_v<decltype(&Variant::template KeyTransform<Params, float>), OperandHook<Params>>;
}

/// The hooks of a variant for queries and keys, which are all that products call. Variants without such hooks share one set
/// of products.
template <typename Params, typename Variant>
using OperandsOf =
    std::conditional_t<KeepsQueries<Params, Variant>() && KeepsKeys<Params, Variant>(), AttentionVariantBase, Variant>;

/// Query token and head of each row of a tile.
struct TileRows {
  int32_t count;
  const int32_t *token, *head;
};

template <typename Params, typename Operands>
class FloatProducts {
 public:
  static constexpr int MOST_DIRECT = 8;  ///< number of rows up to which DirectProducts is faster (heads of 128)

  static int64_t ScratchSize(int tile) {
    return ScratchCursor::Round(int64_t(tile) * LD_QK) + BLOCK_KEYS * (LD_QK + LD_VO) + LANES * LD_QK;
  }

  FloatProducts(const Params& params, int tile, ScratchCursor& scratch)
      : params_(params),
        rotation_(params),
        q_(scratch.Take(int64_t(tile) * LD_QK)),
        k_(scratch.Take(BLOCK_KEYS * LD_QK)),
        v_(scratch.Take(BLOCK_KEYS * LD_VO)),
        rows_(scratch.Take(LANES * LD_QK)) {}

  FLASHINFER_OUTLINED void LoadQueries(Operands& operands, const WorkItem& item, const TileRows& rows, int32_t kv_len) {
    constexpr int PE = Params::HEAD_DIM_PE;
    for (int32_t r = 0; r < rows.count; ++r) {
      const int64_t token = item.qo_begin + rows.token[r], head = rows.head[r];
      float* row = q_ + int64_t(r) * LD_QK;
      LoadRow(params_.q + token * params_.q_stride_n + head * params_.q_stride_h, D_QK - PE, row);
      if constexpr (PE > 0) {
        LoadRow(params_.q_pe + token * params_.q_pe_stride_n + head * params_.q_pe_stride_h, PE, row + D_QK - PE);
      }
      if constexpr (ROTATES) {
        if (r == 0 || rows.token[r] != rows.token[r - 1]) rotation_.Seek(rows.token[r] + kv_len - item.qo_len);
        rotation_.Apply(row);
      }
      for (int d = 0; d < D_QK; ++d) row[d] = operands.QueryTransform(params_, row[d]);
    }
  }

  /// Load `count` keys from j on and their values, and prefetch the next block.
  template <bool PAGED>
  FLASHINFER_OUTLINED void LoadKeys(Operands& operands, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count,
                                    int32_t end) {
    if constexpr (ROTATES) rotation_.Seek(j);
    for (int32_t base = 0; base < count; base += LANES) {
      for (int32_t i = base; i < std::min(base + LANES, count); ++i) {
        float* row = rows_ + (i - base) * LD_QK;
        if (j + i + BLOCK_KEYS < end) keys.PrefetchRow(j + i + BLOCK_KEYS);
        keys.LoadKey(j + i, row);
        if constexpr (Params::SHARED_KV) {
          std::copy_n(row, D_VO, v_ + int64_t(i) * LD_VO);
        } else {
          keys.LoadValue(j + i, v_ + int64_t(i) * LD_VO);
        }
        if constexpr (ROTATES) {
          rotation_.Apply(row);
          rotation_.Advance();
        }
        for (int d = 0; d < D_QK; ++d) row[d] = operands.KeyTransform(params_, row[d]);
      }
      const float* from[LANES];
      for (int i = 0; i < LANES; ++i) from[i] = rows_ + i * LD_QK;
      TransposeRows(from, LD_QK, k_ + base);
    }
  }

  /// Compute s [rows][BLOCK_KEYS] = q k.
  void Score(int32_t rows, float* s) const {
    ForEachRows(rows, [&](auto n, int row) {
      ScoreRows<decltype(n)::value>(q_ + row * LD_QK, LD_QK, k_, D_QK, s + row * BLOCK_KEYS);
    });
  }

  /// Compute o [rows][LD_VO] = o * scale + s v.
  void Accumulate(int32_t rows, int32_t count, const float* s, const float* scale, float* o) const {
    ForEachRows(rows, [&](auto n, int row) {
      AddValueRows<decltype(n)::value>(s + row * BLOCK_KEYS, scale + row, v_, LD_VO, count, o + row * LD_VO);
    });
  }

 private:
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr int LD_QK = Padded(D_QK), LD_VO = Padded(D_VO);
  static constexpr bool ROTATES = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

  const Params& params_;
  std::conditional_t<ROTATES, Rotation<D_QK>, NoRotation> rotation_;
  float *q_, *k_, *v_, *rows_;  // k_ is transposed; rows_ holds the keys before transposition
};

}  // namespace attention
}  // namespace flashinfer
