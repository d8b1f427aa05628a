// SPDX-License-Identifier: Apache-2.0
// Order of (token, slot) pairs by expert on the CPU; parameters in moe/sort.h. One thread: a pair costs a nanosecond,
// and its token's products a hundred microseconds.
//   test  pytest tests/fused_moe/test_moe_sort.py
#pragma once
#include <algorithm>
#include <vector>

#include "../sort.h"

namespace flashinfer {
namespace cpu {

inline int32_t RoundUp(int32_t x, int32_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/// Write the tables of tiles.
inline void WriteTiles(const MoeSortParams& p, const std::vector<int32_t>& counts) {
  int32_t* const tables[] = {p.tile_expert, p.tile_begin, p.tile_end};
  for (int32_t* table : tables) {
    if (table != nullptr) std::fill(table, table + p.max_tiles, -1);
  }
  int32_t tile = 0;
  for (int32_t expert = 0; expert < p.num_experts; ++expert) {
    const int32_t begin = p.expert_offsets[expert], end = begin + counts[expert];
    for (int32_t row = begin; row < end; row += p.tile, ++tile) {
      if (p.tile_expert != nullptr) p.tile_expert[tile] = expert;
      if (p.tile_begin != nullptr) p.tile_begin[tile] = row;
      if (p.tile_end != nullptr) p.tile_end[tile] = std::min(row + p.tile, end);
    }
  }
  if (p.num_tiles != nullptr) *p.num_tiles = tile;
}

}  // namespace cpu

inline Status MoeSort(const MoeSortParams& p, Stream) {
  const auto local = [&](int32_t pair) {  // unsigned: numbers below the range become large
    return uint32_t(p.experts[pair]) - uint32_t(p.first_expert);
  };
  const uint32_t experts = uint32_t(p.num_experts);
  std::vector<int32_t> counts(experts), next(experts);
  for (int32_t pair = 0; pair < p.pairs; ++pair) {
    if (local(pair) < experts) ++counts[local(pair)];
  }
  int32_t rows = 0;
  for (uint32_t expert = 0; expert < experts; ++expert) {
    p.expert_offsets[expert] = next[expert] = rows;
    rows += cpu::RoundUp(counts[expert], p.align);
  }
  p.expert_offsets[experts] = rows;
  if (p.num_rows != nullptr) *p.num_rows = rows;
  if (p.counters != nullptr) std::fill(p.counters, p.counters + MOE_SORT_COUNTERS, 0);
  if (p.expert_counts != nullptr) std::copy(counts.begin(), counts.end(), p.expert_counts);
  if (p.row_to_pair != nullptr) std::fill(p.row_to_pair, p.row_to_pair + p.max_rows, -1);
  for (int32_t pair = 0; pair < p.pairs; ++pair) {
    const int32_t row = local(pair) < experts ? next[local(pair)]++ : -1;
    p.pair_to_row[pair] = row;
    if (p.row_to_pair != nullptr && row >= 0) p.row_to_pair[row] = pair;
  }
  if (p.tile > 0) cpu::WriteTiles(p, counts);
  return 0;
}

}  // namespace flashinfer
