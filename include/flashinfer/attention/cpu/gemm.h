// SPDX-License-Identifier: Apache-2.0
// Matrix products of attention on the CPU, in registers: a few rows times a few vectors of columns at a time, so that
// each load feeds several multiplications. Sizes suit 32 registers of 512 bits, or 16 shorter ones.
#pragma once
#include <type_traits>
#include <utility>

#include "../../cpu/vec.h"

namespace flashinfer {
namespace attention {

// Functions that are compiled once per module, however many callers there are: without it GCC makes a copy for each
// caller, and for each constant that a caller passes.
#if defined(__clang__)
#define FLASHINFER_OUTLINED __attribute__((noinline))
#else
#define FLASHINFER_OUTLINED __attribute__((noinline, noclone))
#endif

// Loops over an array of sums, all of which must be unrolled for the sums to stay in registers: GCC 12 moves them through
// memory otherwise, which costs 10 % of a product of 6 rows and 64 columns.
#if defined(__clang__)
#define FLASHINFER_UNROLL _Pragma("unroll")
#else
#define FLASHINFER_UNROLL _Pragma("GCC unroll 16")
#endif

using cpu::LANES;
using cpu::Shuffle;
using cpu::Vec;

constexpr int BLOCK_KEYS = 64;                      ///< keys per step
constexpr int MAX_ROWS = LANES == 16 ? 6 : 4;       ///< rows per product
constexpr int BLOCK_COLUMNS = LANES == 16 ? 4 : 2;  ///< column vectors per product of MAX_ROWS rows

/// Compute ROWS rows of s [.., BLOCK_KEYS] = q [.., depth] k, with k transposed: [depth][BLOCK_KEYS].
template <int ROWS>
inline void ScoreRows(const float* q, int ldq, const float* k, int depth, float* s) {
  for (int column = 0; column < BLOCK_KEYS; column += BLOCK_COLUMNS * LANES) {
    Vec sum[ROWS][BLOCK_COLUMNS];
    FLASHINFER_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLASHINFER_UNROLL
      for (int c = 0; c < BLOCK_COLUMNS; ++c) sum[r][c] = Vec{};
    }
    const float* from = k + column;
    for (int d = 0; d < depth; ++d, from += BLOCK_KEYS) {
      Vec key[BLOCK_COLUMNS];
      for (int c = 0; c < BLOCK_COLUMNS; ++c) key[c] = cpu::Load(from + c * LANES);
      for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < BLOCK_COLUMNS; ++c) sum[r][c] += q[r * ldq + d] * key[c];
      }
    }
    FLASHINFER_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLASHINFER_UNROLL
      for (int c = 0; c < BLOCK_COLUMNS; ++c) cpu::Store(s + r * BLOCK_KEYS + column + c * LANES, sum[r][c]);
    }
  }
}

/// Compute COLUMNS vectors of ROWS rows of o = o * scale + p [.., BLOCK_KEYS] v [count, ..].
template <int ROWS, int COLUMNS>
inline void AddValues(const float* p, const float* scale, const float* v, int ld, int count, float* o) {
  Vec sum[ROWS][COLUMNS];
  FLASHINFER_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    FLASHINFER_UNROLL
    for (int c = 0; c < COLUMNS; ++c) sum[r][c] = cpu::Load(o + r * ld + c * LANES) * scale[r];
  }
  for (int i = 0; i < count; ++i, v += ld) {
    Vec value[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) value[c] = cpu::Load(v + c * LANES);
    for (int r = 0; r < ROWS; ++r) {
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] += p[r * BLOCK_KEYS + i] * value[c];
    }
  }
  FLASHINFER_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    FLASHINFER_UNROLL
    for (int c = 0; c < COLUMNS; ++c) cpu::Store(o + r * ld + c * LANES, sum[r][c]);
  }
}

template <int ROWS>
inline void AddValueRows(const float* p, const float* scale, const float* v, int ld, int count, float* o) {
  constexpr int WIDE = ROWS <= 2 ? 2 * BLOCK_COLUMNS : BLOCK_COLUMNS;  // enough sums to hide the latency of one
  int column = 0;
  for (; column + WIDE * LANES <= ld; column += WIDE * LANES) {
    AddValues<ROWS, WIDE>(p, scale, v + column, ld, count, o + column);
  }
  for (; column < ld; column += LANES) AddValues<ROWS, 1>(p, scale, v + column, ld, count, o + column);
}

/// Call f(rows, row) with the number of rows as a constant until all rows are done.
template <typename F>
inline void ForEachRows(int rows, const F& f) {
  int row = 0;
  for (; row + MAX_ROWS <= rows; row += MAX_ROWS) f(std::integral_constant<int, MAX_ROWS>{}, row);
  if constexpr (MAX_ROWS > 4) {
    if (row + 4 <= rows) f(std::integral_constant<int, 4>{}, row), row += 4;
  }
  if (row + 2 <= rows) f(std::integral_constant<int, 2>{}, row), row += 2;
  if (row < rows) f(std::integral_constant<int, 1>{}, row);
}

// ------------------------------------------------------------------------------------------------ transposition

/// Swap blocks of H lanes of `a` and `b`: one step of a transposition.
template <int H, size_t... L>
inline void SwapBlocks(Vec& a, Vec& b, std::index_sequence<L...>) {
  const Vec low = Shuffle<(L & H ? LANES + L - H : L)...>(a, b);
  b = Shuffle<(L & H ? LANES + L : L + H)...>(a, b);
  a = low;
}

template <int H>
inline void TransposeStep(Vec* rows) {
  for (int i = 0; i < LANES; ++i) {
    if ((i & H) == 0) SwapBlocks<H>(rows[i], rows[i + H], std::make_index_sequence<LANES>{});
  }
  if constexpr (2 * H < LANES) TransposeStep<2 * H>(rows);
}

/// Transpose LANES rows of `depth` floats (or other 32-bit words) into columns of [depth][BLOCK_KEYS].
inline void TransposeRows(const float* const* from, int depth, float* to) {
  for (int d = 0; d < depth; d += LANES) {
    Vec rows[LANES];
    for (int i = 0; i < LANES; ++i) rows[i] = cpu::Load(from[i] + d);
    TransposeStep<1>(rows);
    for (int i = 0; i < LANES; ++i) cpu::Store(to + (d + i) * BLOCK_KEYS, rows[i]);
  }
}

// ------------------------------------------------------------------------------------------------ functions

/// Return 2^x for x <= 0 to 2 ulp; results below 2^-126 are 0.
inline Vec Exp2(const Vec& x) {
  const Vec low = cpu::Broadcast(-127.f), clamped = x < low ? low : x;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits; so is the bias of an exponent.
  const Vec magic = cpu::Broadcast(12582912.f + 127.f), shifted = clamped + magic, r = clamped - (shifted - magic);
  Vec e = cpu::Broadcast(1.5403530e-4f);  // the series of 2^r, ln(2)^k / k!
  for (const float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) e = e * r + c;
  return e * cpu::BitCast<Vec>(cpu::BitCast<cpu::UintVec>(shifted) << 23);
}

template <int H, size_t... L>
inline Vec SwapHalves(const Vec& v, std::index_sequence<L...>) {
  return Shuffle<(L ^ H)...>(v, v);
}

/// Reduce all lanes with op; every lane of the result holds the reduction.
template <int H = LANES / 2, typename Op>
inline Vec ReduceLanes(const Vec& v, const Op& op) {
  const Vec both = op(v, SwapHalves<H>(v, std::make_index_sequence<LANES>{}));
  if constexpr (H > 1) {
    return ReduceLanes<H / 2>(both, op);
  } else {
    return both;
  }
}

inline Vec Max(const Vec& a, const Vec& b) { return a > b ? a : b; }
inline float ReduceMax(const Vec& v) { return ReduceLanes(v, Max)[0]; }
inline float ReduceSum(const Vec& v) {
  return ReduceLanes(v, [](const Vec& a, const Vec& b) { return a + b; })[0];
}

}  // namespace attention
}  // namespace flashinfer
