// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache: parameters and entries, shared by both backends.
//   append   row t of the keys (values) goes to cache[kv_indices[kv_indptr[b] + pos / page_size]][pos % page_size],
//            where b = batch_indices[t] and pos = positions[t]; rows with b < 0 are skipped. Nothing is converted.
//   indices  b and pos of each row of a ragged batch, from append_indptr and the lengths after the append
// Defined in page.cuh (CUDA) and page_cpu.h (CPU). No build writes outside of the cache: a row without a slot is an
// error found beforehand on the CPU; on CUDA it is skipped, or stops a debug build (FLASHINFER_JIT_DEBUG=1).
//   test  pytest tests/page      bench  python benchmarks/bench_page.py
#pragma once
#include "backend.h"

namespace flashinfer {

/// Strides of (token, head) rows and of (page, entry, head) slots. The unit is the user's: bytes here.
struct TokenStride {
  int64_t token, head;
};
struct SlotStride {
  int64_t page, entry, head;
};

/// Destination of the rows: a list of pages per request. All indices are on the kernel's device.
struct PageTable {
  const int32_t* batch_indices;
  const int32_t* positions;
  const int32_t* kv_indices;
  const int32_t* kv_indptr;
  int64_t num_rows;
  int64_t batch_size;   ///< kv_indptr has one more
  int64_t num_indices;  ///< length of kv_indices
  int64_t num_pages;    ///< pages of the cache
  int64_t page_size;
};

/// One of the two appended tensors (keys or values). Sizes and strides are in bytes.
struct AppendPart {
  const void* rows;
  void* cache;
  TokenStride row_stride;
  SlotStride cache_stride;
  int64_t row_bytes;
};

struct AppendParams {
  PageTable table;
  int64_t num_heads;
  AppendPart key, value;  ///< or ckv and kpe, with one head
  bool enable_pdl;        ///< CUDA only: programmatic dependent launch
};

Status AppendPaged(const AppendParams& params, Stream stream);

struct BatchIndicesParams {
  const int32_t* append_indptr;
  const int32_t* seq_lens;
  int32_t* batch_indices;  ///< -1 where no request owns the row
  int32_t* positions;      ///< 0 there
  int64_t batch_size;
  int64_t num_rows;
};

Status BatchIndicesPositions(const BatchIndicesParams& params, Stream stream);

// ------------------------------------------------------------------------------------------------ host side look-up

struct Slot {
  int64_t page, entry;  ///< page -1: none
};

/// Error of a row. A row that is skipped on purpose has kNone.
enum class RowFault : int { kNone, kBatch, kPosition, kIndptr, kPage };

/// Find the slot of a row, from tables in host memory.
inline RowFault FindSlot(const PageTable& t, int64_t row, Slot* slot) {
  *slot = {-1, 0};
  const int64_t batch = t.batch_indices[row], position = t.positions[row];
  if (batch < 0) return RowFault::kNone;
  if (batch >= t.batch_size) return RowFault::kBatch;
  const int64_t begin = t.kv_indptr[batch], end = t.kv_indptr[batch + 1];
  if (begin < 0 || end > t.num_indices) return RowFault::kIndptr;
  if (position < 0 || begin + position / t.page_size >= end) return RowFault::kPosition;
  const int64_t page = t.kv_indices[begin + position / t.page_size];
  if (page < 0 || page >= t.num_pages) return RowFault::kPage;
  *slot = {page, position % t.page_size};
  return RowFault::kNone;
}

}  // namespace flashinfer
