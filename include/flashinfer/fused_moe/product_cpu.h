// SPDX-License-Identifier: Apache-2.0
// Products of sorted rows with the weights of their experts on the CPU. Weights are streamed as gemm/stream_cpu.h does it
// for every number of rows, so that the sums of a row do not depend on how many rows its expert has.
// Four-bit weights are decoded to fp32, some rows at a time, and multiplied from there.
#pragma once
#include <atomic>

#include "../cpu/fp4.h"
#include "../cpu/parallel.h"
#include "../fused_moe.h"
#include "../gemm/stream_cpu.h"
#include "../gemm/w4_layout.h"

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
inline int64_t FoldedIndex(int64_t row, int64_t group, int64_t k, int64_t groups_per_128, int64_t c) {
  const int64_t f = 64 * groups_per_128 / c, in_block = row % 64;
  const int64_t block = row / 64 * (k / 128) + group / groups_per_128;
  return (block * f + in_block % f) * c + in_block / f * groups_per_128 + group % groups_per_128;
}

/// Value of an e2m1 code whose exponent was moved by `offset`, as e4m3 (the rewriting of MXFP4 for e4m3 activations).
inline float ShiftedE2M1(uint32_t code, uint32_t offset) {
  const uint32_t magnitude = code & 7;
  uint32_t bits = 0;
  if (magnitude == 1) bits = offset * 8;
  if (magnitude == 2 || magnitude == 3) bits = offset * 8 + 8 + 4 * (magnitude - 2);
  if (magnitude >= 4) bits = offset * 8 + 16 + 4 * (magnitude - 4);
  const float value = cpu::DecodeE4M3(uint8_t(bits));
  return code & 8 ? -value : value;
}

/// Fill a table with the values of the 16 codes of one group.
inline void FillCodes(const Weights& w, int64_t expert, int64_t row, int64_t group, float (&table)[16]) {
  const bool is_int4 = w.format == Format::kInt4Fp8;
  const int64_t groups_per_128 = is_int4 ? 1 : 4, c = is_int4 ? 8 : 16;
  const int64_t index = expert * w.n * (w.k / 128) * groups_per_128 + FoldedIndex(row, group, w.k, groups_per_128, c);
  for (uint32_t code = 0; code < 16; ++code) {
    const uint8_t byte = uint8_t(code);
    if (is_int4) {
      table[code] = float(code < 8 ? int(code) : int(code) - 16) *
                    static_cast<float>(static_cast<const bfloat16_t*>(w.scales)[index]);
    } else if (w.format == Format::kMxfp4) {
      table[code] = cpu::DecodeE2M1(&byte, 0) * cpu::DecodeE8M0(static_cast<const uint8_t*>(w.scales)[index]);
    } else {
      table[code] = ShiftedE2M1(code, static_cast<const uint8_t*>(w.scales)[index]);
    }
  }
}

/// Decode rows of four-bit weights to fp32, rows of k contiguous.
template <bool IS_INT4>
void DecodeRows(const Weights& w, int64_t expert, int64_t row, int64_t rows, float* to) {
  constexpr int64_t BLOCK = gemm::W4_BLOCK_COLUMNS, GROUP = IS_INT4 ? 128 : 32;
  const uint8_t* const codes = static_cast<const uint8_t*>(w.data) + expert * w.n * (w.k / 2);
  for (int64_t i = 0; i < rows; ++i) {
    float* const out = to + i * w.k;
    for (int64_t k = 0; k < w.k; k += BLOCK) {
      float tables[2][16];  // values of the 16 codes in each half of the block, with the scale of its group
      for (int g = 0; g < 2; ++g) FillCodes(w, expert, row + i, (k + g * (BLOCK / 2)) / GROUP, tables[g]);
      gemm::ForEachCode<IS_INT4>(codes, row + i, k, w.k, [&](int64_t column, uint32_t code) {
        out[column] = tables[(column - k) / (BLOCK / 2)][code];
      });
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
