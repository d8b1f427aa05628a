// SPDX-License-Identifier: Apache-2.0
// The innermost loops of the CPU product: rows of a packed chunk times a panel, added to fp32 sums.
#pragma once
#include "pack.h"

namespace flashinfer {
namespace gemm {

/// Rows whose sums fit the registers: 14 x 2 of 32 with AVX-512, otherwise 6 x 2 of 16. The rest holds operands.
constexpr int TILE_ROWS = LANES == 16 ? 14 : 6;

/// Add a ROWS x PANEL_N block of products over one chunk to `sums`. With scales, row i and column j of it are
/// multiplied by row_scale[i] and column_scale[j] first.
template <int ROWS>
inline void AddProducts(const float* a, const float* b, int64_t depth, float* sums, int64_t stride,
                        const float* row_scale, const float* column_scale) {
  Vec low[ROWS] = {}, high[ROWS] = {};
  for (int i = 0; i < ROWS; ++i) {  // sums of large tiles come from L3
    __builtin_prefetch(sums + i * stride, 1);
    __builtin_prefetch(sums + i * stride + LANES, 1);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b_low = cpu::Load(b + k * PANEL_N), b_high = cpu::Load(b + k * PANEL_N + LANES);
#pragma GCC unroll 14
    for (int i = 0; i < ROWS; ++i) {
      const Vec x = a[i * PANEL_STRIDE + k] - Vec{};  // one load; 0 + x keeps an addition, for the sign of zero
      low[i] += x * b_low;
      high[i] += x * b_high;
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < ROWS; ++i) {
    float* row = sums + i * stride;
    if (row_scale != nullptr) {
      low[i] *= cpu::Load(column_scale) * row_scale[i];
      high[i] *= cpu::Load(column_scale + LANES) * row_scale[i];
    }
    cpu::Store(row, cpu::Load(row) + low[i]);
    cpu::Store(row + LANES, cpu::Load(row + LANES) + high[i]);
  }
}

using AddProductsFunction = void (*)(const float*, const float*, int64_t, float*, int64_t, const float*, const float*);

template <int... I>
inline AddProductsFunction AddProductsOf(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr AddProductsFunction FUNCTIONS[] = {AddProducts<I + 1>...};
  return FUNCTIONS[rows - 1];
}

/// Multiply all rows of a packed chunk with all its panels. Rows are shared out evenly: 16 are 8 and 8, not 14 and 2.
inline void MultiplyChunk(const float* a, const float* b, int64_t rows, int64_t columns, int64_t depth, float* sums,
                          int64_t stride, const float* row_scale, const float* column_scale) {
  const int64_t strips = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t j = 0; j < columns; j += PANEL_N) {
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t i = rows * s / strips, count = rows * (s + 1) / strips - i;
      const auto add = AddProductsOf(count, std::make_integer_sequence<int, TILE_ROWS>{});
      add(a + i * PANEL_STRIDE, b + j * CHUNK_K, depth, sums + i * stride + j, stride,
          row_scale == nullptr ? nullptr : row_scale + i, column_scale == nullptr ? nullptr : column_scale + j);
    }
  }
}

}  // namespace gemm
}  // namespace flashinfer
