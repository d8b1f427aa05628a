// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache on the CPU; layouts and parameters in page.h. The launcher has checked every row.
// A token is copied in one piece where its heads follow each other on both sides (NHD), head by head otherwise.
//   test  pytest tests/page      bench  python benchmarks/bench_page.py
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "page.h"

namespace flashinfer {
namespace cpu {

inline void AppendRow(const AppendPart& part, int64_t row, const Slot& slot, int64_t heads) {
  const char* from = static_cast<const char*>(part.rows) + row * part.row_stride.token;
  char* to = static_cast<char*>(part.cache) + slot.page * part.cache_stride.page + slot.entry * part.cache_stride.entry;
  if (heads == 1 || (part.row_stride.head == part.row_bytes && part.cache_stride.head == part.row_bytes)) {
    std::memcpy(to, from, heads * part.row_bytes);
    return;
  }
  for (int64_t head = 0; head < heads; ++head) {
    std::memcpy(to + head * part.cache_stride.head, from + head * part.row_stride.head, part.row_bytes);
  }
}

}  // namespace cpu

inline Status AppendPaged(const AppendParams& p, Stream) {
  const int64_t row_bytes = p.num_heads * (p.key.row_bytes + p.value.row_bytes);
  if (row_bytes == 0) return 0;
  cpu::ParallelFor(p.table.num_rows, row_bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Slot slot;
      FindSlot(p.table, row, &slot);
      if (slot.page < 0) continue;
      cpu::AppendRow(p.key, row, slot, p.num_heads);
      cpu::AppendRow(p.value, row, slot, p.num_heads);
    }
  });
  return 0;
}

inline Status BatchIndicesPositions(const BatchIndicesParams& p, Stream) {
  std::fill_n(p.batch_indices, p.num_rows, -1);
  std::fill_n(p.positions, p.num_rows, 0);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t begin = std::max<int64_t>(p.append_indptr[b], 0);
    const int64_t end = std::min<int64_t>(p.append_indptr[b + 1], p.num_rows);
    const int32_t shift = p.seq_lens[b] - p.append_indptr[b + 1];
    for (int64_t row = begin; row < end; ++row) {
      p.batch_indices[row] = static_cast<int32_t>(b);
      p.positions[row] = static_cast<int32_t>(row) + shift;
    }
  }
  return 0;
}

}  // namespace flashinfer
