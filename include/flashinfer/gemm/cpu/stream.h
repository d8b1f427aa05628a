// SPDX-License-Identifier: Apache-2.0
// Products of few rows on the CPU: K-major weights are read once, in the order of memory, and multiplied as they come.
// Nothing is transposed: a register holds consecutive elements of K, and its lanes are added up after the last one.
#pragma once
#include <vector>

#include "pack.h"

namespace flashinfer {
namespace gemm {

constexpr int64_t STREAM_ROWS = 32;        // more rows are faster with packed weights
constexpr int64_t STREAM_BYTES = 1 << 19;  // bytes of decoded tokens, which stay in L2
constexpr int STREAM_STRIP = 4;            // rows of tokens per pass over some weights

/// Weights per pass, for as many sums as the registers hold.
template <int ROWS>
constexpr int STREAM_WEIGHTS = LANES == 16 ? (ROWS == STREAM_STRIP ? 6 : 8) : (ROWS == STREAM_STRIP ? 2 : 4);

/// Scales of the rows of a pass: one address each, and the distance between blocks along K.
struct StreamScale {
  const float* rows[8];
  int64_t stride;
};

inline StreamScale StreamScaleOf(const Scale& x, int64_t batch, int64_t row, int64_t rows) {
  static constexpr float ONE = 1.f;
  if (!IsBlockScale(x)) return {{&ONE, &ONE, &ONE, &ONE, &ONE, &ONE, &ONE, &ONE}, 0};
  StreamScale view{{}, x.k_stride};
  for (int64_t i = 0; i < 8; ++i) {
    view.rows[i] = x.data + batch * x.batch_stride + (row + std::min(i, rows - 1)) / x.rows * x.row_stride;
  }
  return view;
}

/// Multiply ROWS rows of fp32 tokens with R rows of weights. `total` gets sums of lanes; each block of `depth`
/// elements is multiplied by its scales if there are any.
template <int ROWS, int R, bool HAS_BLOCKS, typename T>
inline void StreamProducts(const float* a, int64_t a_stride, const T* const (&b)[R], int64_t k, int64_t depth,
                           const StreamScale& a_scale, const StreamScale& b_scale, Vec (&total)[ROWS][R]) {
  for (int64_t begin = 0, block = 0; begin < k; begin += depth, ++block) {
    const int64_t end = HAS_BLOCKS ? std::min(k, begin + depth) : k, whole = end / LANES * LANES;
    Vec sum[ROWS][R] = {};
    const auto add = [&](int64_t i, auto lanes) {
      Vec x[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) x[r] = cpu::Load(b[r] + i, lanes);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        const Vec y = cpu::Load(a + row * a_stride + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[row][r] += x[r] * y;
      }
    };
    for (int64_t i = begin; i < whole; i += LANES) add(i, cpu::AllLanes{});
    if (whole < end) add(whole, cpu::SomeLanes{static_cast<int>(end - whole)});
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if constexpr (HAS_BLOCKS) {
          const float scale = a_scale.rows[row][block * a_scale.stride] * b_scale.rows[r][block * b_scale.stride];
          total[row][r] += sum[row][r] * scale;
        } else {
          total[row][r] = sum[row][r];
        }
      }
    }
  }
}

/// Multiply `rows` (at most ROWS; the others are zero) rows of decoded tokens with weights [column, column + columns).
template <int ROWS, bool HAS_BLOCKS, typename T>
inline void StreamStrip(const GemmArguments& p, const Tile& t, int64_t strip, int64_t rows, const float* a,
                        int64_t a_stride, int64_t column, float* sums, int64_t stride) {
  constexpr int R = STREAM_WEIGHTS<ROWS>;
  const int64_t columns = std::min<int64_t>(R, t.column + t.columns - column);
  const T* b[R];
  for (int r = 0; r < R; ++r) b[r] = At<T>(p.b, t.weight, column + std::min<int64_t>(r, columns - 1), 0);
  Vec total[ROWS][R] = {};
  if constexpr (HAS_BLOCKS) {
    const int64_t depth = IsBlockScale(p.a_scale) ? p.a_scale.depth : p.b_scale.depth;
    StreamProducts<ROWS, R, true>(a, a_stride, b, p.k, depth, StreamScaleOf(p.a_scale, t.batch, t.row + strip, rows),
                                  StreamScaleOf(p.b_scale, t.weight, column, columns), total);
  } else {
    StreamProducts<ROWS, R, false>(a, a_stride, b, p.k, std::max<int64_t>(p.k, 1), {}, {}, total);
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t r = 0; r < columns; ++r) sums[i * stride + r] = cpu::ReduceSum(total[i][r]);
  }
}

/// Tell whether a segment of so many rows is computed by streaming.
inline bool StreamsWeights(const GemmArguments& p, int64_t rows) {
  if (p.b.column_stride != 1 || rows > STREAM_ROWS) return false;
  if (rows > STREAM_STRIP && rows * p.k * int64_t{sizeof(float)} > STREAM_BYTES) return false;
  const bool has_blocks = IsBlockScale(p.a_scale) || IsBlockScale(p.b_scale);
  if (!has_blocks) return true;
  const int64_t depth = IsBlockScale(p.a_scale) ? p.a_scale.depth : p.b_scale.depth;
  return (p.b.element == Element::kE4M3 || p.b.element == Element::kE5M2) && depth % LANES == 0;
}

/// Sum the products of a tile over K.
inline void StreamTile(const GemmArguments& p, const Tile& t, float* sums, int64_t stride) {
  const int64_t a_stride = (p.k + LANES - 1) / LANES * LANES + 16;  // not a power of two: rows share no cache set
  const int64_t size = (t.rows + STREAM_STRIP - 1) / STREAM_STRIP * STREAM_STRIP * a_stride;
  static thread_local std::vector<float> scratch;
  scratch.assign(size, 0.f);
  float* a = scratch.data();
  PackRows(p.a, t.batch, t.row, t.rows, 0, p.k, a, a_stride);
  const bool has_blocks = IsBlockScale(p.a_scale) || IsBlockScale(p.b_scale);
  WithElement(p.b.element, [&](auto type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    const auto pass = [&](auto rows_of, auto blocks) {
      constexpr int ROWS = decltype(rows_of)::value;
      for (int64_t j = 0; j < t.columns; j += STREAM_WEIGHTS<ROWS>) {
        for (int64_t i = 0; i < t.rows; i += ROWS) {
          StreamStrip<ROWS, decltype(blocks)::value, T>(p, t, i, std::min<int64_t>(ROWS, t.rows - i), a + i * a_stride,
                                                        a_stride, t.column + j, sums + i * stride + j, stride);
        }
      }
    };
    const auto choose = [&](auto blocks) {
      if (t.rows == 1) return pass(std::integral_constant<int, 1>{}, blocks);
      if (t.rows == 2) return pass(std::integral_constant<int, 2>{}, blocks);
      return pass(std::integral_constant<int, STREAM_STRIP>{}, blocks);
    };
    if constexpr (sizeof(T) == 1) {
      if (has_blocks) return choose(std::true_type{});
    }
    return choose(std::false_type{});
  });
}

}  // namespace gemm
}  // namespace flashinfer
