// SPDX-License-Identifier: Apache-2.0
// q.k and p.v of a few rows directly from keys and values as stored. Each is converted in registers for up to four rows
// at a time; with so few rows, laying them out for larger products first (cpu/products.h, cpu/amx.h) costs more than it
// saves.
#pragma once
#include "products.h"

namespace flashinfer {
namespace attention {

/// Return the vector whose lane i is the sum of the lanes of v[i].
template <int H = 1>
inline Vec SumOfEach(Vec* v) {
  for (int i = 0; i < LANES; i += 2 * H) {
    SwapBlocks<H>(v[i], v[i + H], std::make_index_sequence<LANES>{});
    v[i] += v[i + H];
  }
  if constexpr (2 * H < LANES) {
    return SumOfEach<2 * H>(v);
  } else {
    return v[0];
  }
}

template <typename Params, typename Operands>
class DirectProducts {
 public:
  using T = typename Params::DTypeKV;
  static constexpr bool SUPPORTED =
      !std::is_same_v<T, uint8_t> && !Params::SHARED_KV && Params::POS_ENCODING != PosEncodingMode::kRoPELlama &&
      Params::HEAD_DIM_QK % LANES == 0 && Params::HEAD_DIM_VO % LANES == 0 && KeepsKeys<Params, Operands>();

  static int64_t ScratchSize(int tile) { return ScratchCursor::Round(int64_t(tile) * D_QK); }

  DirectProducts(const Params& params, int tile, ScratchCursor& scratch)
      : params_(params), q_(scratch.Take(int64_t(tile) * D_QK)) {}

  FLASHINFER_OUTLINED void LoadQueries(Operands& operands, const WorkItem& item, const TileRows& rows, int32_t) {
    for (int32_t r = 0; r < rows.count; ++r) {
      const int64_t token = item.qo_begin + rows.token[r], head = rows.head[r];
      float* row = q_ + int64_t(r) * D_QK;
      LoadRow(params_.q + token * params_.q_stride_n + head * params_.q_stride_h, D_QK, row);
      for (int d = 0; d < D_QK; ++d) row[d] = operands.QueryTransform(params_, row[d]);
    }
    following_ = -1;
  }

  /// Look up `count` keys from j on, and the keys after them, which the products prefetch.
  template <bool PAGED>
  FLASHINFER_OUTLINED void LoadKeys(Operands&, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count,
                                    int32_t end) {
    if (following_ == j) {
      std::swap(now_, next_);
    } else {
      Find(now_, keys, j, count);
    }
    following_ = j + count;
    Find(next_, keys, following_, std::min(BLOCK_KEYS, end - following_));
    count_ = count;
  }

  void Score(int32_t rows, float* s) {
    bool is_first = true;  // first pass over the keys
    ForEachFew(rows, [&](auto n, int row) {
      ScoreRows<decltype(n)::value>(q_ + row * D_QK, s + row * BLOCK_KEYS, is_first);
      is_first = false;
    });
  }

  void Accumulate(int32_t rows, int32_t count, const float* s, const float* scale, float* o) {
    bool is_first = true;
    ForEachFew(rows, [&](auto n, int row) {
      AddRows<decltype(n)::value>(s + row * BLOCK_KEYS, scale + row, count, o + row * D_VO, is_first);
      is_first = false;
    });
  }

 private:
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;

  /// Addresses of the keys and values of a block.
  struct Places {
    const T *key[BLOCK_KEYS], *value[BLOCK_KEYS];
    int32_t count;
  };

  /// Call f(rows, row) with the number of rows, up to 4, as a constant.
  template <typename F>
  static void ForEachFew(int rows, const F& f) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) f(std::integral_constant<int, 4>{}, row);
    if (row + 2 <= rows) f(std::integral_constant<int, 2>{}, row), row += 2;
    if (row < rows) f(std::integral_constant<int, 1>{}, row);
  }

  template <bool PAGED>
  static void Find(Places& places, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count) {
    places.count = std::max(count, 0);
    for (int32_t i = 0; i < places.count; ++i) {
      places.key[i] = keys.Key(j + i);
      places.value[i] = keys.Value(j + i);
    }
  }

  /// Score as many keys at a time as fill one register of sums.
  template <int ROWS>
  void ScoreRows(const float* q, float* s, bool asks) const {
    constexpr int KEYS = LANES / ROWS;
    for (int i = 0; i < count_; i += KEYS) {
      const T* key[KEYS];
      for (int k = 0; k < KEYS; ++k) {
        key[k] = now_.key[std::min(i + k, count_ - 1)];
        if (asks && i + k < next_.count) Prefetch<D_QK* int(sizeof(T))>(next_.key[i + k]);
      }
      Vec sum[LANES];
      FLASHINFER_UNROLL
      for (int i = 0; i < LANES; ++i) sum[i] = Vec{};
      for (int d = 0; d < D_QK; d += LANES) {
        Vec x[KEYS];
        for (int k = 0; k < KEYS; ++k) x[k] = cpu::Load(key[k] + d);
        for (int r = 0; r < ROWS; ++r) {
          const Vec y = cpu::Load(q + r * D_QK + d);
          for (int k = 0; k < KEYS; ++k) sum[r * KEYS + k] += x[k] * y;
        }
      }
      float sums[LANES];
      cpu::Store(sums, SumOfEach(sum));
      for (int r = 0; r < ROWS; ++r) std::copy_n(sums + r * KEYS, KEYS, s + r * BLOCK_KEYS + i);
    }
  }

  template <int ROWS>
  void AddRows(const float* p, const float* scale, int32_t count, float* o, bool asks) const {
    constexpr int MOST = ROWS == 1 ? 8 : 4, VECTORS = D_VO / LANES;
    AddColumns<ROWS, std::min(MOST, VECTORS)>(p, scale, count, o, 0, asks);
    int column = std::min(MOST, VECTORS);
    for (; column + MOST <= VECTORS; column += MOST) AddColumns<ROWS, MOST>(p, scale, count, o, column, false);
    if constexpr (VECTORS > MOST && VECTORS % MOST != 0) {
      for (; column < VECTORS; ++column) AddColumns<ROWS, 1>(p, scale, count, o, column, false);
    }
  }

  /// Compute COLUMNS vectors of ROWS rows of o = o * scale + p v, from vector `first` on.
  template <int ROWS, int COLUMNS>
  void AddColumns(const float* p, const float* scale, int32_t count, float* o, int first, bool asks) const {
    Vec sum[ROWS][COLUMNS];
    FLASHINFER_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLASHINFER_UNROLL
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] = cpu::Load(o + r * D_VO + (first + c) * LANES) * scale[r];
    }
    for (int i = 0; i < count; ++i) {
      if (asks && i < next_.count) Prefetch<D_VO* int(sizeof(T))>(next_.value[i]);
      Vec x[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) x[c] = cpu::Load(now_.value[i] + (first + c) * LANES);
      for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) sum[r][c] += p[r * BLOCK_KEYS + i] * x[c];
      }
    }
    FLASHINFER_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLASHINFER_UNROLL
      for (int c = 0; c < COLUMNS; ++c) cpu::Store(o + r * D_VO + (first + c) * LANES, sum[r][c]);
    }
  }

  const Params& params_;
  float* q_;
  Places now_, next_;
  int32_t count_ = 0, following_ = -1;
};

}  // namespace attention
}  // namespace flashinfer
