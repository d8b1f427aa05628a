// SPDX-License-Identifier: Apache-2.0
// The k largest elements of rows, or of a window of each: parameters and entry, shared by both backends.
//   Order of elements: by value, NaN above all numbers and the two zeros equal; elements of the same value by index, the
//   smaller first (or the larger first). So which k are taken is always determined; `order` says how they are listed.
// Defined in topk.cuh (CUDA) and topk_cpu.h (CPU).
//   test  pytest tests/topk      bench  python benchmarks/bench_topk.py
#pragma once
#include <cstdint>

#include "backend.h"
#include "host_device.h"

namespace flashinfer {

enum class TopKOrder : int32_t {
  kAny = 0,      ///< whatever is fastest; may differ from call to call
  kByIndex = 1,  ///< ascending index
  kByValue = 2,  ///< descending value, elements of the same value by ascending index
};

/// Columns [start, start + length) of a row.
struct TopKWindow {
  int32_t start, length;
};

template <typename T>
struct TopKParams {
  const T* input;
  int64_t row_stride, rows;
  int32_t width;  ///< columns of the input
  int32_t k;      ///< at least 1; slots of the outputs

  const int32_t* lengths;             ///< lengths of windows, one per `next_n` rows, or null: whole rows
  const int32_t* row_starts;          ///< first columns of windows, one per row, or null: 0
  int32_t next_n = 1;                 ///< rows of a request; the last sees lengths[request], each before it one less
  int32_t compress_ratio = 1;         ///< columns are lengths divided by this
  bool prefer_large_indices = false;  ///< among equal values at the end of the selection
  TopKOrder order = TopKOrder::kAny;  ///< order of the outputs of windows longer than k; by value: of all windows

  // Outputs: (rows, k) each, contiguous. Slots that are left over get -1, and 0 in `values`.
  T* values;                  ///< or null
  int64_t* indices;           ///< column within the window; or null
  int32_t* transformed;       ///< offsets[row] + column, or its slot in the page table; or null
  int32_t* raw_indices;       ///< column within the window; or null
  const int32_t* offsets;     ///< or null: 0
  const int32_t* page_table;  ///< or null: no page table
  int64_t page_table_stride, page_table_rows, page_table_width;
  const int32_t* row_to_batch;           ///< row of the page table, or null: the same
  const int32_t* page_table_row_starts;  ///< entry of a window's first page, or null: as row_starts
  int32_t page_shift;                    ///< log2 of the page size

  // How the CUDA kernel works; results do not depend on it.
  int32_t capacity;        ///< elements a block keeps in shared memory
  int32_t blocks_per_row;  ///< 0: chosen; a cluster where there are several
  bool enable_pdl;         ///< programmatic dependent launch
};

template <typename T>
FLASHINFER_HD TopKWindow WindowOf(const TopKParams<T>& p, int64_t row) {
  TopKWindow window{0, p.width};
  if (p.row_starts != nullptr) window.start = p.row_starts[row];
  if (window.start < 0) window.start = 0;
  if (window.start > p.width) window.start = p.width;
  if (p.lengths != nullptr) {
    const int32_t request = int32_t(row / p.next_n), token = int32_t(row - int64_t(request) * p.next_n);
    window.length = (p.lengths[request] - p.next_n + token + 1) / p.compress_ratio;
  }
  if (window.length > p.width - window.start) window.length = p.width - window.start;
  if (window.length < 0) window.length = 0;
  return window;
}

/// Return the page table entry of column `index` of a row's window.
struct PageTableEntry {
  int64_t row, column;
};

template <typename T>
FLASHINFER_HD PageTableEntry PageTableEntryOf(const TopKParams<T>& p, int64_t row, int32_t index) {
  const int32_t* starts = p.page_table_row_starts != nullptr ? p.page_table_row_starts : p.row_starts;
  return {p.row_to_batch == nullptr ? row : p.row_to_batch[row],
          int64_t{starts == nullptr ? 0 : starts[row]} + (index >> p.page_shift)};
}

template <typename T>
FLASHINFER_HD bool HasEntry(const TopKParams<T>& p, const PageTableEntry& entry) {
  return entry.row >= 0 && entry.row < p.page_table_rows && entry.column >= 0 && entry.column < p.page_table_width;
}

/// Return `transformed` for column `index` of the window; -1 for -1, and where the page table has no entry.
template <typename T>
FLASHINFER_HD int32_t TransformIndex(const TopKParams<T>& p, int64_t row, int32_t index) {
  if (index < 0) return index;
  if (p.page_table == nullptr) return index + (p.offsets == nullptr ? 0 : p.offsets[row]);
  const PageTableEntry entry = PageTableEntryOf(p, row, index);
  if (!HasEntry(p, entry)) return -1;
  const int32_t page = p.page_table[entry.row * p.page_table_stride + entry.column];
  return (page << p.page_shift) + (index & ((1 << p.page_shift) - 1));
}

template <typename T>
Status TopK(const TopKParams<T>& params, Stream stream);

}  // namespace flashinfer
