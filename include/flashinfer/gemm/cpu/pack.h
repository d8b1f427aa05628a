// SPDX-License-Identifier: Apache-2.0
// Blocks of operands as fp32, in the order in which the CPU kernel reads them.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../cpu/vec.h"
#include "../../gemm.h"

namespace flashinfer {
namespace gemm {

using cpu::LANES;
using cpu::Vec;

constexpr int64_t PANEL_N = 2 * LANES;  // weights side by side in a panel of b
constexpr int64_t CHUNK_K = 256;        // elements of K per pass over a tile: a panel of b has 32 KiB with AVX-512
/// Distance between the rows of a packed panel of a. It is odd in cache lines, so that rows fall into different sets.
constexpr int64_t PANEL_STRIDE = CHUNK_K + 16;

/// Block of the result that one thread computes.
struct Tile {
  int64_t row, rows, column, columns;
  int64_t batch;   // matrix of a and d
  int64_t weight;  // matrix of b
  bool streams;    // computed by stream.h: so are all tiles of a segment, however it is cut
};

inline bool IsBlockScale(const Scale& x) {
  return x.data != nullptr && (x.batch_stride != 0 || x.row_stride != 0 || x.k_stride != 0);
}

/// Call f with a null pointer of the C++ type of `element`.
template <typename F>
inline void WithElement(Element element, const F& f) {
  switch (element) {
    case Element::kFloat32:
      return f(static_cast<const float*>(nullptr));
    case Element::kFloat16:
      return f(static_cast<const float16_t*>(nullptr));
    case Element::kBFloat16:
      return f(static_cast<const bfloat16_t*>(nullptr));
    case Element::kE4M3:
      return f(static_cast<const float8_e4m3_t*>(nullptr));
    case Element::kE5M2:
      return f(static_cast<const float8_e5m2_t*>(nullptr));
  }
}

/// Transpose LANES vectors of LANES elements: each of log2(LANES) rounds interleaves the halves of the list.
template <int... I>
inline Vec ZipLow(const Vec& a, const Vec& b, std::integer_sequence<int, I...>) {
  return cpu::Shuffle<(I / 2 + I % 2 * LANES)...>(a, b);
}
template <int... I>
inline Vec ZipHigh(const Vec& a, const Vec& b, std::integer_sequence<int, I...>) {
  return cpu::Shuffle<(LANES / 2 + I / 2 + I % 2 * LANES)...>(a, b);
}
inline void Transpose(Vec* rows) {
  constexpr std::make_integer_sequence<int, LANES> lanes;
#pragma GCC unroll 4
  for (int width = 1; width < LANES; width *= 2) {
    Vec next[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = ZipLow(rows[i], rows[i + LANES / 2], lanes);
      next[2 * i + 1] = ZipHigh(rows[i], rows[i + LANES / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) rows[i] = next[i];
  }
}

/// Write to[i * to_stride + j] = from[i * stride_i + j * stride_j] as fp32, for i < rows and j < columns. Strides of 1
/// take whole vectors, along j directly and along i transposed.
template <typename T>
inline void DecodeBlock(const T* from, int64_t stride_i, int64_t stride_j, int64_t rows, int64_t columns, float* to,
                        int64_t to_stride) {
  if (stride_j == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = from + i * stride_i;
      float* out = to + i * to_stride;
      int64_t j = 0;
      for (; j + LANES <= columns; j += LANES) {
        cpu::Store(out + j, cpu::Load(row + j));
        __builtin_prefetch(row + 2 * stride_i + j, 0, 2);  // runs are too short for the hardware to look ahead
      }
      for (; j < columns; ++j) out[j] = static_cast<float>(row[j]);
    }
    return;
  }
  const int64_t whole_i = stride_i == 1 ? rows / LANES * LANES : 0, whole_j = columns / LANES * LANES;
  for (int64_t i = 0; i < whole_i; i += LANES) {
    for (int64_t j = 0; j < whole_j; j += LANES) {
      Vec block[LANES];
      for (int x = 0; x < LANES; ++x) {
        const T* const line = from + i + (j + x) * stride_j;
        block[x] = cpu::Load(line);
        __builtin_prefetch(line + PANEL_N * stride_j, 0, 2);  // the next panel
      }
      Transpose(block);
      for (int x = 0; x < LANES; ++x) cpu::Store(to + (i + x) * to_stride + j, block[x]);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_i ? whole_j : 0; j < columns; ++j) {
      to[i * to_stride + j] = static_cast<float>(from[i * stride_i + j * stride_j]);
    }
  }
}

/// Return the address of element (row, k) of a matrix of a batch.
template <typename T>
inline const T* At(const Matrix& x, int64_t batch, int64_t row, int64_t k) {
  return static_cast<const T*>(x.data) + batch * x.batch_stride + row * x.row_stride + k * x.column_stride;
}

/// Decode rows of a: row i begins at to[i * stride].
inline void PackRows(const Matrix& a, int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t depth, float* to,
                     int64_t stride) {
  WithElement(a.element, [&](auto type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    DecodeBlock(At<T>(a, batch, row, k), a.row_stride, a.column_stride, rows, depth, to, stride);
  });
}

/// Pack rows of b in panels of PANEL_N: row j, element k is to[panel * PANEL_N * CHUNK_K + k * PANEL_N + j]. Rows that
/// the last panel lacks are zero.
inline void PackPanels(const Matrix& b, int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t depth, float* to) {
  WithElement(b.element, [&](auto type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    for (int64_t j = 0; j < rows; j += PANEL_N) {
      float* panel = to + j * CHUNK_K;
      const int64_t count = std::min(PANEL_N, rows - j);
      if (count < PANEL_N) std::memset(panel, 0, depth * PANEL_N * sizeof(float));
      DecodeBlock(At<T>(b, batch, row + j, k), b.column_stride, b.row_stride, depth, count, panel, PANEL_N);
    }
  });
}

}  // namespace gemm
}  // namespace flashinfer
