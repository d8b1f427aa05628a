// SPDX-License-Identifier: Apache-2.0
// Products of sorted rows with the weights of their experts on the CPU. Weights are streamed as gemm/cpu/stream.h does
// it for every number of rows, so that the sums of a row do not depend on how many rows its expert has.
// Four-bit weights are decoded to fp32, some rows at a time, and multiplied from there.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../../cpu/fp4.h"
#include "../../cpu/parallel.h"
#include "../layer.h"
#include "../../gemm/cpu/stream.h"
#include "../../gemm/w4_layout.h"

namespace flashinfer {
namespace fused_moe {

/// Weights of a product: (num_experts, n, k), K-major; four-bit ones in the order of gemm/w4_layout.h.
struct Weights {
  const void* data;
  Format format;
  Element element;  // type of kPlain weights
  int64_t n, k;
  const void* scales;  // kFp8Block: fp32 (experts, ceil(n / 128), ceil(k / 128)); four-bit formats: folded, see below
};

constexpr int64_t WEIGHTS_PER_TILE = 48;  // a multiple of the rows of weights in a pass
constexpr int64_t MOST_WEIGHTS_PER_TILE = 4 * WEIGHTS_PER_TILE;

/// Return the index of a folded scale: scales (experts, n, k / group) are stored as (experts, n / 64, k / 128, f, c),
/// c = 16 / bytes, f = 64 * (128 / group) / c, with row 64 b + s f + i and group q (128 / group) + g at
/// [b, q, i, s (128 / group) + g].
template <int GROUPS_PER_128, int BYTES>
inline uint64_t FoldedIndex(uint64_t row, uint64_t group, uint64_t k) {
  constexpr uint64_t C = 16 / BYTES, F = 64 * GROUPS_PER_128 / C, GROUPS = GROUPS_PER_128;
  const uint64_t in_block = row % 64, block = row / 64 * (k / 128) + group / GROUPS;
  return (block * F + in_block % F) * C + in_block / F * GROUPS + group % GROUPS;
}

/// Return the scale of a group of columns of four-bit weights.
template <bool IS_INT4>
inline float FoldedScale(const Weights& w, int64_t expert, int64_t row, int64_t group) {
  constexpr int GROUPS_PER_128 = IS_INT4 ? 1 : 4;
  const int64_t first = expert * w.n * (w.k / 128) * GROUPS_PER_128;
  if constexpr (IS_INT4) {
    return static_cast<float>(static_cast<const bfloat16_t*>(w.scales)[first + FoldedIndex<1, 2>(row, group, w.k)]);
  }
  const uint8_t byte = static_cast<const uint8_t*>(w.scales)[first + FoldedIndex<GROUPS_PER_128, 1>(row, group, w.k)];
  constexpr int SHIFT = 127 - 6;  // exponent of e8m0 less offset: an offset means 2^(offset - 6)
  return cpu::DecodeE8M0(w.format == Format::kMxfp4 ? byte : uint8_t(std::min(byte + SHIFT, 254)));
}

typedef uint32_t CodeVec __attribute__((vector_size(32)));  // 8 columns; the compiler divides them among registers
typedef int32_t IntegerVec __attribute__((vector_size(32)));
typedef float NumberVec __attribute__((vector_size(32)));

/// Return e2m1 numbers of magnitudes below 8 and signs of one bit.
inline NumberVec NumbersOfE2M1(const CodeVec& magnitude, const CodeVec& sign) {
  const NumberVec small = __builtin_convertvector(IntegerVec(magnitude), NumberVec) * 0.5f;  // 0 and 0.5
  const CodeVec large = (magnitude << 22) + (126u << 23), is_small = CodeVec(magnitude < 2);
  return NumberVec(((CodeVec(small) & is_small) | (large & ~is_small)) ^ sign << 31);
}

/// Store the numbers that are code `i` of half words, times a scale.
template <bool IS_INT4>
inline void StoreNumbers(const CodeVec& halves, int i, float scale, float* to) {
  NumberVec numbers;
  if constexpr (IS_INT4) {
    numbers = __builtin_convertvector(IntegerVec((halves >> 4 * i & 15) ^ 8) - 8, NumberVec);
  } else {
    numbers = NumbersOfE2M1(halves >> gemm::E2M1_BITS[i][3] & 7, halves >> gemm::E2M1_BITS[i][0] & 1);
  }
  numbers *= scale;
  std::memcpy(to, &numbers, sizeof(numbers));
}

/// Decode the 64 columns of a row of a block of shifted codes, whose halves have a scale each. `i`: half of the block's rows.
inline void DecodeShiftedBlock(const uint8_t* codes, int i, const float (&scales)[2], float* to) {
  constexpr auto& S = gemm::SHIFTED_SIGNS;
  constexpr CodeVec PLACES[2] = {{0, 4, 8, 12, 0, 4, 8, 12}, {16, 20, 24, 28, 16, 20, 24, 28}};
  constexpr CodeVec SIGNS[2] = {{S[0], S[1], S[2], S[3], S[0], S[1], S[2], S[3]},
                                {S[4], S[5], S[6], S[7], S[4], S[5], S[6], S[7]}};
  for (int j = 0; j < 4; ++j) {  // 16 columns of two lanes each
    uint32_t first, second;
    std::memcpy(&first, codes + j % 2 * 32 + (j / 2 * 2 + i) * 4, 4);
    std::memcpy(&second, codes + j % 2 * 32 + 16 + (j / 2 * 2 + i) * 4, 4);
    const CodeVec words = {first, first, first, first, second, second, second, second};
    for (int half = 0; half < 2; ++half) {  // a half has 32 columns
      const NumberVec numbers = NumbersOfE2M1(words >> PLACES[half] & 7, words >> SIGNS[half] & 1) * scales[j / 2];
      std::memcpy(to + j / 2 * 32 + half * 16 + j % 2 * 8, &numbers, sizeof(numbers));
    }
  }
}

/// Decode the 64 columns of a row of a block, whose halves have a scale each.
template <bool IS_INT4>
inline void DecodeBlock(const uint8_t* codes, int i, const float (&scales)[2], float* to) {
  for (int j = 0; j < 4; ++j, to += 16) {
    CodeVec halves;
    for (int lane = 0; lane < 4; ++lane) {
      uint32_t word;
      std::memcpy(&word, codes + lane * 16 + j * 4, 4);
      halves[2 * lane] = word & 0xFFFF, halves[2 * lane + 1] = word >> 16;
    }
    StoreNumbers<IS_INT4>(halves, i, scales[j / 2], to);
    StoreNumbers<IS_INT4>(halves, i + 2, scales[j / 2], to + 8);
  }
}

/// Decode rows of four-bit weights to fp32, rows of k contiguous.
template <bool IS_INT4>
void DecodeRows(const Weights& w, int64_t expert, int64_t row, int64_t rows, float* to) {
  constexpr int64_t BLOCK = gemm::W4_BLOCK_COLUMNS, GROUP = IS_INT4 ? 128 : 32;
  const uint8_t* const codes = static_cast<const uint8_t*>(w.data) + expert * w.n * (w.k / 2);
  for (const int64_t end = row + rows; row < end; ++row) {
    for (int64_t k = 0; k < w.k; k += BLOCK, to += BLOCK) {
      const float scales[2] = {FoldedScale<IS_INT4>(w, expert, row, k / GROUP),
                               FoldedScale<IS_INT4>(w, expert, row, (k + BLOCK / 2) / GROUP)};
      const uint8_t* const block = gemm::W4RowOf(codes, row, k, w.k);
      const int i = int(row % gemm::W4_BLOCK_ROWS / 8);
      if (w.format == Format::kMxfp4Fp8) {
        DecodeShiftedBlock(block, i, scales, to);
      } else {
        DecodeBlock<IS_INT4>(block, i, scales, to);
      }
    }
  }
}

inline void DecodeWeights(const Weights& w, int64_t expert, int64_t row, int64_t rows, float* to) {
  w.format == Format::kInt4Fp8 ? DecodeRows<true>(w, expert, row, rows, to)
                               : DecodeRows<false>(w, expert, row, rows, to);
}

inline gemm::GemmArguments ProductArguments(const Operand& a, const Weights& w) {
  gemm::GemmArguments p;
  p.n = w.n, p.k = w.k;
  p.a = {a.data, a.element, 0, w.k, 1};
  p.b = {const_cast<void*>(w.data), w.format == Format::kPlain ? w.element : Element::kE4M3, w.n * w.k, w.k, 1};
  if (w.format == Format::kFp8Block) {
    const int64_t blocks = (w.k + 127) / 128;
    p.a_scale = {a.scales, 0, 1, a.scale_stride, 1, 128};
    p.b_scale = {static_cast<const float*>(w.scales), (w.n + 127) / 128 * blocks, blocks, 1, 128, 128};
  }
  return p;
}

/// Multiply rows [begin, end) of an expert with weights [column, column + columns) and store the sums.
inline void MultiplyRows(const gemm::GemmArguments& p, const gemm::Tile& whole, const Sums& d, int64_t d_column,
                         int64_t per_tile) {
  constexpr int64_t STRIP = gemm::STREAM_STRIP;
  const int64_t fitting = gemm::STREAM_BYTES / int64_t(sizeof(float)) / std::max<int64_t>(p.k, 1);
  const int64_t step = std::max(STRIP, std::min(gemm::STREAM_ROWS, fitting) / STRIP * STRIP);
  static thread_local const cpu::Scratch sums(gemm::STREAM_ROWS * MOST_WEIGHTS_PER_TILE);
  for (int64_t row = whole.row; row < whole.row + whole.rows; row += step) {
    gemm::Tile t = whole;
    t.row = row, t.rows = std::min(step, whole.row + whole.rows - row);
    gemm::StreamTile(p, t, &sums[0], per_tile);
    gemm::WithElement(d.element, [&](auto type) {
      auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(type)>>*>(d.data);
      for (int64_t i = 0; i < t.rows; ++i) {
        auto* out = to + (row + i) * d.columns + d_column;
        const float* from = &sums[i * per_tile];
        cpu::ForEachVec(t.columns,
                        [&](int64_t j, auto lanes) { cpu::Store(out + j, cpu::Load(from + j, lanes), lanes); });
      }
    });
  }
}

/// d[row] = a[row] times the weights of the row's expert. `per_tile` weights, a multiple of WEIGHTS_PER_TILE, are a unit
/// of work: the sums do not depend on it.
inline void Multiply(const Operand& a, const Weights& w, const SortedPairs& pairs, const Sums& d,
                     int64_t per_tile = WEIGHTS_PER_TILE) {
  const bool is_packed = w.format >= Format::kMxfp4;
  const gemm::GemmArguments arguments = ProductArguments(a, w);
  const int64_t tiles = (w.n + per_tile - 1) / per_tile;
  std::vector<int32_t> used;
  for (int32_t e = 0; e < pairs.num_experts; ++e) {
    if (pairs.expert_offsets[e + 1] > pairs.expert_offsets[e]) used.push_back(e);
  }
  const int64_t items = int64_t(used.size()) * tiles, rows = pairs.expert_offsets[pairs.num_experts];
  if (items == 0) return;
  std::atomic<int64_t> next{0};
  // Experts differ in rows, so each thread takes the next tile when it is done. Products are counted by 16 as elements.
  cpu::ParallelFor(items, std::max<int64_t>(1, rows * w.n * w.k / 16 / items), [&](int64_t, int64_t) {
    const cpu::Scratch decoded(is_packed ? per_tile * w.k : 0);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const int32_t e = used[i / tiles];
      const int64_t column = i % tiles * per_tile, columns = std::min(per_tile, w.n - column);
      const int64_t row = pairs.expert_offsets[e];
      gemm::Tile t{row, pairs.expert_offsets[e + 1] - row, column, columns, 0, e, true};
      if (!is_packed) {
        MultiplyRows(arguments, t, d, column, per_tile);
        continue;
      }
      DecodeWeights(w, e, column, columns, &decoded[0]);
      gemm::GemmArguments p = arguments;
      p.b = {&decoded[0], Element::kFloat32, 0, w.k, 1};
      t.column = 0, t.weight = 0;
      MultiplyRows(p, t, d, column, per_tile);
    }
  });
}

}  // namespace fused_moe
}  // namespace flashinfer
