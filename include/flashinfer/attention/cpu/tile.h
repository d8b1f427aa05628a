// SPDX-License-Identifier: Apache-2.0
// Attention of one work item on one thread with an online softmax, BLOCK_KEYS keys at a time:
//   o = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m),  s_j = LogitsTransform(q.k_j) * sm_scale_log2,  m = max_j s_j
#pragma once
#include <algorithm>
#include <cmath>

#include "amx.h"
#include "direct.h"
#include "products.h"
#include "../common/backend_interface.h"
#include "../variants.h"

namespace flashinfer {
namespace attention {

/// Scratch memory of a thread, kept between launches: fresh pages cost more than a short decode.
class Arena {
 public:
  static float* Take(int64_t floats) {
    static thread_local Arena arena;
    if (floats > arena.size_) {
      arena.~Arena();
      new (&arena) Arena(floats);
    }
    return arena.data_;
  }

 private:
  Arena() = default;
  explicit Arena(int64_t floats)
      : data_(static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t{64}))), size_(floats) {}
  ~Arena() { ::operator delete(data_, std::align_val_t{64}); }
  float* data_ = nullptr;
  int64_t size_ = 0;
};

/// Write the result of one row.
template <typename Params>
inline void WriteRow(const Params& params, int64_t token, int64_t head, const float* o, float score) {
  auto* to = params.o + token * params.o_stride_n + head * params.o_stride_h;
  cpu::ForEachVec(Params::HEAD_DIM_VO, [&](int64_t i, auto lanes) {
    cpu::Store(to + i, cpu::Load(o + i, lanes) * params.out_scale, lanes);
  });
  if (params.lse != nullptr) params.lse[token * params.num_qo_heads + head] = score * params.lse_scale;
}

/// State of the rows of a tile: scores, sums of weighted values, largest score and denominator of each row.
template <typename Params, typename Variant>
class RowStates {
 public:
  static int64_t ScratchSize(int tile) { return int64_t(tile) * (LD_VO + BLOCK_KEYS) + 5 * ScratchCursor::Round(tile); }

  RowStates(const Params& params, const WorkList& work, int tile, ScratchCursor& scratch)
      : params_(params),
        work_(work),
        tile_(tile),
        s_(scratch.Take(int64_t(tile) * BLOCK_KEYS)),
        o_(scratch.Take(int64_t(tile) * LD_VO)),
        m_(scratch.Take(tile)),
        d_(scratch.Take(tile)),
        scale_(scratch.Take(tile)),
        token_(reinterpret_cast<int32_t*>(scratch.Take(tile))),
        head_(reinterpret_cast<int32_t*>(scratch.Take(tile))) {}

  /// Name the rows of an item and initialise their state.
  FLASHINFER_OUTLINED TileRows Start(Variant& variant, const WorkItem& item, int32_t kv_head) {
    const int32_t group = int32_t(params_.group.divisor);
    const int32_t rows = std::min(tile_, item.qo_len * group - item.row_begin);
    std::fill_n(o_, int64_t(rows) * LD_VO, 0.f);
    for (int32_t r = 0; r < rows; ++r) {
      token_[r] = int32_t(params_.group.Divide(uint32_t(item.row_begin + r)));
      head_[r] = kv_head * group + item.row_begin + r - token_[r] * group;
      m_[r] = Variant::use_softmax ? -math::inf : 0.f;
      d_[r] = Variant::use_softmax ? 0.f : 1.f;
      float scale = 1.f;
      if (Variant::use_softmax && item.is_first) {
        variant.update_m_d(params_, 0u, uint32_t(head_[r]), m_[r], d_[r], scale);
      }
    }
    return {rows, token_, head_};
  }

  /// Turn the scores of all rows for `count` keys from j on into weights of the values.
  void Weigh(Variant& variant, const MaskOf<Params>& mask, const WorkItem& item, int32_t kv_head, int32_t rows,
             int32_t j, int32_t count) {
    for (int32_t r = 0; r < rows; ++r) WeighRow(variant, mask, item, kv_head, r, j, count);
  }

  FLASHINFER_OUTLINED void Finish(Variant& variant, const WorkItem& item, int32_t rows, int32_t slot) {
    for (int32_t r = 0; r < rows; ++r) {
      float* o = o_ + int64_t(r) * LD_VO;
      float m = m_[r], d = d_[r];
      for (int i = 0; i < D_VO; ++i) {
        o[i] = variant.OutputTransform(params_, o[i], uint32_t(item.request), uint32_t(token_[r]), uint32_t(head_[r]),
                                       m, d, 1.f);
      }
      const float score = m == -math::inf ? -math::inf : m + std::log2(d);
      if (slot >= 0) {
        const int64_t at = int64_t(slot) * tile_ + r;
        std::copy_n(o, D_VO, work_.partial_o + at * D_VO);
        work_.partial_lse[at] = score;
      } else {
        WriteRow(params_, item.qo_begin + token_[r], head_[r], o, score);
      }
    }
  }

  float* scores() const { return s_; }
  float* sums() const { return o_; }
  const float* scales() const { return scale_; }  ///< factors that rescale the sums

 private:
  static constexpr int D_VO = Params::HEAD_DIM_VO, LD_VO = Padded(D_VO);

  /// Turn the scores of a row into weights of the values and update its state.
  void WeighRow(Variant& variant, const MaskOf<Params>& mask, const WorkItem& item, int32_t kv_head, int32_t r,
                int32_t j, int32_t count) {
    const uint32_t request = uint32_t(item.request), token = uint32_t(token_[r]), head = uint32_t(head_[r]);
    const int32_t first = std::min(std::max(mask.First(token_[r]) - j, 0), BLOCK_KEYS);
    const int32_t end = std::max(std::min(mask.End(token_[r]) - j, count), first);
    float s[BLOCK_KEYS];  // a local array, so that the compiler can vectorise the hook loops
    std::copy_n(s_ + r * BLOCK_KEYS, BLOCK_KEYS, s);
    for (int32_t i = 0; i < count; ++i) {
      s[i] = variant.LogitsTransform(params_, s[i], request, token, uint32_t(j + i), head, uint32_t(kv_head));
    }
    if constexpr (Variant::use_softmax) {
      for (int i = 0; i < BLOCK_KEYS; i += LANES) cpu::Store(s + i, cpu::Load(s + i) * variant.sm_scale_log2);
    }
    constexpr float HIDDEN = Variant::use_softmax ? -math::inf : 0.f;
    for (int32_t i = 0; i < first; ++i) s[i] = HIDDEN;
    for (int32_t i = end; i < BLOCK_KEYS; ++i) s[i] = HIDDEN;
    for (int32_t i = first; i < end; ++i) {
      if (!variant.LogitsMask(params_, request, token, uint32_t(j + i), head, uint32_t(kv_head))) s[i] = HIDDEN;
    }
    if (mask.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
      for (int32_t i = first; i < end; ++i) {
        if (!VisibleInItem(params_, request, mask.qo_len, mask.kv_len, token_[r], j + i)) s[i] = HIDDEN;
      }
    }
    if constexpr (Variant::use_softmax) {
      Normalise(r, s);
    } else {
      scale_[r] = 1.f;
      std::copy_n(s, BLOCK_KEYS, s_ + r * BLOCK_KEYS);
    }
  }

  void Normalise(int32_t r, const float* s) {
    Vec largest = cpu::Load(s);
    for (int i = LANES; i < BLOCK_KEYS; i += LANES) largest = Max(largest, cpu::Load(s + i));
    const float m = std::max(m_[r], ReduceMax(largest)), base = m == -math::inf ? 0.f : m;
    Vec sum{};
    for (int i = 0; i < BLOCK_KEYS; i += LANES) {
      const Vec p = Exp2(cpu::Load(s + i) - base);
      cpu::Store(s_ + r * BLOCK_KEYS + i, p);
      sum += p;
    }
    scale_[r] = m == m_[r] ? 1.f : std::exp2(m_[r] - base);
    d_[r] = d_[r] * scale_[r] + ReduceSum(sum);
    m_[r] = m;
  }

  const Params& params_;
  const WorkList& work_;
  const int32_t tile_;
  float *s_, *o_;           // scores, later weights; sums of weighted values
  float *m_, *d_, *scale_;  // per row: largest score, denominator, factor that rescales o
  int32_t *token_, *head_;
};

struct NoProducts {
  template <typename... Args>
  explicit NoProducts(const Args&...) {}
  static int64_t ScratchSize(int) { return 0; }
};

/// Runner of tiles. Products is FloatProducts or MatrixProducts; tiles of few rows are multiplied by DirectProducts,
/// where it exists. The choice depends only on the tile's own rows, so that no request depends on others.
template <typename Params, typename Variant, typename Products>
class TileRunner {
 public:
  TileRunner(const Params& params, const WorkList& work, int tile, bool is_paged)
      : params_(params),
        tile_(tile),
        is_paged_(is_paged),
        scratch_(Arena::Take(Products::ScratchSize(tile) + States::ScratchSize(tile) + Few::ScratchSize(DECODE_TILE))),
        many_(params, tile, scratch_),
        states_(params, work, tile, scratch_),
        few_(params, DECODE_TILE, scratch_) {}

  void Run(const WorkItem& item, int32_t kv_head, int32_t slot) {
    if constexpr (HAS_DIRECT) {
      const int32_t rows = item.qo_len * int32_t(params_.group.divisor) - item.row_begin;
      if (tile_ == DECODE_TILE && rows <= Products::MOST_DIRECT) return RunWith(few_, item, kv_head, slot);
    }
    RunWith(many_, item, kv_head, slot);
  }

 private:
  using States = RowStates<Params, Variant>;
  using Operands = OperandsOf<Params, Variant>;
  using Direct = DirectProducts<Params, Operands>;
  static constexpr bool HAS_DIRECT = Direct::SUPPORTED;
  using Few = std::conditional_t<HAS_DIRECT, Direct, NoProducts>;

  template <typename P>
  FLASHINFER_OUTLINED void RunWith(P& products, const WorkItem& item, int32_t kv_head, int32_t slot) {
    const int32_t kv_len = item.kv_len >= 0 ? item.kv_len : int32_t(params_.get_kv_len(item.request));
    const MaskOf<Params> mask(params_, item.qo_len, kv_len);
    Variant variant(params_, uint32_t(item.request), nullptr);
    const TileRows rows = states_.Start(variant, item, kv_head);
    const int32_t begin = std::max(item.kv_start, mask.First(rows.token[0]));
    const int32_t end = std::min({item.kv_end, mask.End(rows.token[rows.count - 1]), kv_len});
    if (begin < end) products.LoadQueries(variant, item, rows, kv_len);
    const KeyAddress<Params, true> pages{params_, item.kv_begin, kv_head};
    const KeyAddress<Params, false> ragged{params_, item.kv_begin, kv_head};
    for (int32_t j = begin; j < end; j += BLOCK_KEYS) {
      const int32_t count = std::min(BLOCK_KEYS, end - j);
      if (is_paged_) {
        products.LoadKeys(variant, pages, j, count, end);
      } else {
        products.LoadKeys(variant, ragged, j, count, end);
      }
      products.Score(rows.count, states_.scores());
      states_.Weigh(variant, mask, item, kv_head, rows.count, j, count);
      products.Accumulate(rows.count, count, states_.scores(), states_.scales(), states_.sums());
    }
    states_.Finish(variant, item, rows.count, slot);
  }

  const Params& params_;
  const int32_t tile_;
  const bool is_paged_;
  ScratchCursor scratch_;
  Products many_;
  States states_;
  Few few_;
};

}  // namespace attention
}  // namespace flashinfer
