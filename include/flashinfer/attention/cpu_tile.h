// SPDX-License-Identifier: Apache-2.0
// Attention of one work item on one thread, BLOCK_KEYS keys at a time: keys (transposed) and values become floats in
// scratch memory that stays in the cache, all rows of the tile use them, and the softmax is updated as it goes.
//   o = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m),  s_j = LogitsTransform(q.k_j) * sm_scale_log2,  m = max_j s_j
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu_load.h"
#include "entry.h"
#include "variants.h"

namespace flashinfer {
namespace attention {

/// Scratch memory of a thread, kept from launch to launch: fresh pages cost more than a short decode.
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

/// The result of one row.
template <typename Params>
inline void WriteRow(const Params& params, int64_t token, int64_t head, const float* o, float score) {
  auto* to = params.o + token * params.o_stride_n + head * params.o_stride_h;
  cpu::ForEachVec(Params::HEAD_DIM_VO, [&](int64_t i, auto lanes) {
    cpu::Store(to + i, cpu::Load(o + i, lanes) * params.out_scale, lanes);
  });
  if (params.lse != nullptr) params.lse[token * params.num_qo_heads + head] = score * params.lse_scale;
}

template <typename Params, typename Variant, bool PAGED>
class TileRunner {
 public:
  TileRunner(const Params& params, const WorkList& work, int tile)
      : params_(params), work_(work), tile_(tile), rotation_(params) {
    float* at = Arena::Take(int64_t(tile) * (LD_QK + LD_VO + BLOCK_KEYS + 5) + BLOCK_KEYS * (LD_QK + LD_VO) +
                            LANES * LD_QK + 9 * LANES);
    auto take = [&at](int64_t floats) { return std::exchange(at, at + (floats + LANES - 1) / LANES * LANES); };
    k_ = take(BLOCK_KEYS * LD_QK);
    v_ = take(BLOCK_KEYS * LD_VO);
    rows_ = take(LANES * LD_QK);
    s_ = take(int64_t(tile) * BLOCK_KEYS);
    q_ = take(int64_t(tile) * LD_QK);
    o_ = take(int64_t(tile) * LD_VO);
    m_ = take(tile);
    d_ = take(tile);
    scale_ = take(tile);
    token_ = reinterpret_cast<int32_t*>(take(tile));
    head_ = reinterpret_cast<int32_t*>(take(tile));
  }

  void Run(const WorkItem& item, int32_t kv_head, int32_t slot) {
    const int32_t group = int32_t(params_.group.divisor);
    const int32_t kv_len = item.kv_len >= 0 ? item.kv_len : int32_t(params_.get_kv_len(item.request));
    const int32_t rows = std::min(tile_, item.qo_len * group - item.row_begin);
    const MaskOf<Params> mask(params_, item.qo_len, kv_len);
    Variant variant(params_, uint32_t(item.request), nullptr);
    for (int32_t r = 0; r < rows; ++r) {
      token_[r] = int32_t(params_.group.Divide(uint32_t(item.row_begin + r)));
      head_[r] = kv_head * group + item.row_begin + r - token_[r] * group;
    }
    Start(variant, item, rows);
    const int32_t begin = std::max(item.kv_start, mask.First(token_[0]));
    const int32_t end = std::min({item.kv_end, mask.End(token_[rows - 1]), kv_len});
    if (begin < end) LoadQueries(variant, item, rows, kv_len);
    const KeyAddress<Params, PAGED> keys{params_, item.kv_begin, kv_head};
    for (int32_t j = begin; j < end; j += BLOCK_KEYS) {
      const int32_t count = std::min(BLOCK_KEYS, end - j);
      LoadKeys(variant, keys, j, count, end);
      ForEachRows(rows, [&](auto n, int row) {
        ScoreRows<decltype(n)::value>(q_ + row * LD_QK, LD_QK, k_, D_QK, s_ + row * BLOCK_KEYS);
      });
      for (int32_t r = 0; r < rows; ++r) Weigh(variant, mask, item, kv_head, r, j, count);
      ForEachRows(rows, [&](auto n, int row) {
        constexpr int ROWS = decltype(n)::value;
        AddValueRows<ROWS>(s_ + row * BLOCK_KEYS, scale_ + row, v_, LD_VO, count, o_ + row * LD_VO);
      });
    }
    Finish(variant, item, rows, slot);
  }

 private:
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr int LD_QK = Padded(D_QK), LD_VO = Padded(D_VO);
  static constexpr bool ROTATES = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

  /// The state before any key.
  void Start(Variant& variant, const WorkItem& item, int32_t rows) {
    std::fill_n(o_, int64_t(rows) * LD_VO, 0.f);
    for (int32_t r = 0; r < rows; ++r) {
      m_[r] = Variant::use_softmax ? -math::inf : 0.f;
      d_[r] = Variant::use_softmax ? 0.f : 1.f;
      float scale = 1.f;
      if (Variant::use_softmax && item.is_first) {
        variant.update_m_d(params_, 0u, uint32_t(head_[r]), m_[r], d_[r], scale);
      }
    }
  }

  void LoadQueries(Variant& variant, const WorkItem& item, int32_t rows, int32_t kv_len) {
    constexpr int PE = Params::HEAD_DIM_PE;
    for (int32_t r = 0; r < rows; ++r) {
      const int64_t token = item.qo_begin + token_[r], head = head_[r];
      float* row = q_ + int64_t(r) * LD_QK;
      LoadRow(params_.q + token * params_.q_stride_n + head * params_.q_stride_h, D_QK - PE, row);
      if constexpr (PE > 0) {
        LoadRow(params_.q_pe + token * params_.q_pe_stride_n + head * params_.q_pe_stride_h, PE, row + D_QK - PE);
      }
      if constexpr (ROTATES) {
        if (r == 0 || token_[r] != token_[r - 1]) rotation_.Seek(token_[r] + kv_len - item.qo_len);
        rotation_.Apply(row);
      }
      for (int d = 0; d < D_QK; ++d) row[d] = variant.QueryTransform(params_, row[d]);
    }
  }

  /// Keys from j on, and their values. Those after them are asked for.
  void LoadKeys(Variant& variant, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count, int32_t end) {
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
        for (int d = 0; d < D_QK; ++d) row[d] = variant.KeyTransform(params_, row[d]);
      }
      TransposeRows(rows_, LD_QK, LD_QK, k_ + base);
    }
  }

  /// Scores of a row become weights of the values, and its state follows.
  void Weigh(Variant& variant, const MaskOf<Params>& mask, const WorkItem& item, int32_t kv_head, int32_t r, int32_t j,
             int32_t count) {
    const uint32_t request = uint32_t(item.request), token = uint32_t(token_[r]), head = uint32_t(head_[r]);
    const int32_t first = std::min(std::max(mask.First(token_[r]) - j, 0), BLOCK_KEYS);
    const int32_t end = std::max(std::min(mask.End(token_[r]) - j, count), first);
    float* s = s_ + r * BLOCK_KEYS;
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
    }
  }

  void Normalise(int32_t r, float* s) {
    Vec largest = cpu::Load(s);
    for (int i = LANES; i < BLOCK_KEYS; i += LANES) {
      const Vec x = cpu::Load(s + i);
      largest = x > largest ? x : largest;
    }
    const float m = std::max(m_[r], ReduceMax(largest)), base = m == -math::inf ? 0.f : m;
    Vec sum{};
    for (int i = 0; i < BLOCK_KEYS; i += LANES) {
      const Vec p = Exp2(cpu::Load(s + i) - base);
      cpu::Store(s + i, p);
      sum += p;
    }
    scale_[r] = m == m_[r] ? 1.f : std::exp2(m_[r] - base);
    d_[r] = d_[r] * scale_[r] + cpu::ReduceSum(sum);
    m_[r] = m;
  }

  void Finish(Variant& variant, const WorkItem& item, int32_t rows, int32_t slot) {
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

  const Params& params_;
  const WorkList& work_;
  const int32_t tile_;
  std::conditional_t<ROTATES, Rotation<D_QK>, NoRotation> rotation_;
  float *q_, *k_, *v_, *rows_, *s_, *o_;  // k_ is transposed; rows_ are the keys before that
  float *m_, *d_, *scale_;                // of each row: largest score, denominator, what a new maximum makes of o
  int32_t *token_, *head_;
};

}  // namespace attention
}  // namespace flashinfer
