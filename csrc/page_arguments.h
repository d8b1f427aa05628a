// SPDX-License-Identifier: Apache-2.0
// Helpers of the launchers of the page family: layouts of a paged cache, tables of a batch, validation of their values.
#pragma once
#include <flashinfer/page.h>

#include <limits>
#include <utility>
#include <vector>

#include "tvm_ffi_utils.h"

namespace flashinfer {
namespace page {

/// Keys or values of a paged cache; strides in elements.
struct CacheView {
  char* data;
  int64_t num_pages, page_size, num_heads, head_dim;
  SlotStride stride;
};

/// Make a view of keys or values. `t` is one tensor of a pair, NHD (pages, page_size, heads, dim) or HND (pages, heads,
/// page_size, dim); or, if `half` is 0 (keys) or 1 (values), both in one tensor, with a dimension of two after the
/// first. The page_size dimension may be missing if it is 1.
inline CacheView ViewOf(const char* op, const char* name, const TensorView& t, bool is_hnd, int half,
                        bool packed_scales = false) {
  const int first = half < 0 ? 1 : 2;
  Expect(op, name, t).rank(first + 2, first + 3);
  if (half >= 0) Expect(op, name, t).dim(1, 2, "keys and values");
  const int64_t item = t.dtype().bits * t.dtype().lanes / 8;
  CacheView view{
      t.data_ptr<char>() + (half == 1 ? t.stride(1) * item : 0), t.size(0), 1, 0, t.size(-1), {t.stride(0), 0, 0}};
  int head = first;
  if (t.ndim() == first + 3) {
    const int entry = is_hnd ? first + 1 : first;
    head = is_hnd ? first : first + 1;
    view.page_size = t.size(entry);
    view.stride.entry = t.stride(entry);
  }
  view.num_heads = t.size(head);
  view.stride.head = t.stride(head);
  if (packed_scales && t.size(-1) > 1 && t.stride(-1) != 1) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << ": the innermost stride must be 1, got " << t.stride(-1);
  }
  Expect(op, name, t).last_dim_contiguous().distinct();
  return view;
}

[[noreturn]] inline void FailSize(const char* op, const char* name, const char* what, int64_t size, int64_t expected,
                                  const char* because) {
  FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have " << expected << " " << what << " (" << because
                                  << "), got " << size;
}

/// Validate that a cache holds rows of `num_heads` x `head_dim`, and has the same pages as `twin`, the cache of the
/// keys.
inline void ExpectSizes(const char* op, const char* name, const CacheView& cache, const CacheView& twin,
                        int64_t num_heads, int64_t head_dim) {
  if (cache.num_heads != num_heads) FailSize(op, name, "heads", cache.num_heads, num_heads, "those of append_key");
  if (cache.head_dim != head_dim)
    FailSize(op, name, "elements per head", cache.head_dim, head_dim, "from the appended rows");
  if (cache.num_pages != twin.num_pages)
    FailSize(op, name, "pages", cache.num_pages, twin.num_pages, "those of the keys");
  if (cache.page_size != twin.page_size)
    FailSize(op, name, "tokens per page", cache.page_size, twin.page_size, "those of the keys");
  if (cache.page_size < 1) FailSize(op, name, "tokens per page", cache.page_size, 1, "or more");
}

/// Validate append_key or append_value: (rows, heads, dim), any strides except for the last dimension.
inline void ExpectRows(const char* op, const char* name, const TensorView& t, const TensorView& key) {
  Expect(op, name, t)
      .same_device(key, "append_key")
      .same_dtype(key, "append_key")
      .rank(3)
      .dim(0, key.size(0), "append_key.shape[0]")
      .dim(1, key.size(1), "append_key.shape[1]")
      .last_dim_contiguous();
  if (t.size(2) == 0) FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".shape[2] must be at least 1, got 0";
}

inline void ExpectIndices(const char* op, const char* name, const TensorView& t, const TensorView& rows) {
  Expect(op, name, t).same_device(rows, "the appended rows").dtype({dl_int32}).rank(1).contiguous();
}

struct IndexTensors {
  const TensorView &batch_indices, &positions, &kv_indices, &kv_indptr;

  /// True if kernels can read the tables. Checked here because Python takes 0.1 us per tensor.
  bool AreInt32() const {
    bool all = true;
    for (const TensorView* t : {&batch_indices, &positions, &kv_indices, &kv_indptr}) {
      all = all && encode_dlpack_dtype(t->dtype()) == encode_dlpack_dtype(dl_int32);
    }
    return all;
  }
};

/// Validate the index tensors, and return the page table of a batch that appends `rows`.
inline PageTable TableOf(const char* op, const IndexTensors& in, const TensorView& rows, int64_t num_pages,
                         int64_t page_size) {
  ExpectIndices(op, "batch_indices", in.batch_indices, rows);
  ExpectIndices(op, "positions", in.positions, rows);
  ExpectIndices(op, "kv_indices", in.kv_indices, rows);
  ExpectIndices(op, "kv_indptr", in.kv_indptr, rows);
  Expect(op, "batch_indices", in.batch_indices).dim(0, rows.size(0), "the number of appended rows");
  Expect(op, "positions", in.positions).dim(0, rows.size(0), "the number of appended rows");
  if (in.kv_indptr.size(0) < 1)
    FLASHINFER_THROW(ArgumentError) << op << ": kv_indptr must have batch_size + 1 entries, got 0";
  if (rows.size(0) > std::numeric_limits<int32_t>::max()) {
    FLASHINFER_THROW(ArgumentError) << op << ": rows to append must be fewer than 2^31, got " << rows.size(0);
  }
  PageTable t{};
  t.batch_indices = in.batch_indices.data_ptr<int32_t>();
  t.positions = in.positions.data_ptr<int32_t>();
  t.kv_indices = in.kv_indices.data_ptr<int32_t>();
  t.kv_indptr = in.kv_indptr.data_ptr<int32_t>();
  t.num_rows = rows.size(0);
  t.batch_size = in.kv_indptr.size(0) - 1;
  t.num_indices = in.kv_indices.size(0);
  t.num_pages = num_pages;
  t.page_size = page_size;
  return t;
}

#ifdef FLASHINFER_CPU
/// Throw if offsets of requests decrease, on the CPU only: kernels would assign rows to wrong requests.
template <typename T>
void CheckRising(const char* op, const char* name, const T* indptr, int64_t requests) {
  for (int64_t i = 0; i < requests; ++i) {
    if (indptr[i + 1] < indptr[i]) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << name << "[" << i << "] to " << name << "[" << i + 1
                                      << "] must not decrease, got " << indptr[i] << " to " << indptr[i + 1];
    }
  }
}
#endif

[[noreturn]] inline void FailRow(const char* op, const PageTable& t, int64_t row, RowFault fault) {
  const int64_t batch = t.batch_indices[row], position = t.positions[row];
  if (fault == RowFault::kBatch) {
    FLASHINFER_THROW(ArgumentError) << op << ": batch_indices[" << row << "] must be less than " << t.batch_size
                                    << " (kv_indptr has " << t.batch_size << " requests), got " << batch;
  }
  const int64_t begin = t.kv_indptr[batch], end = t.kv_indptr[batch + 1];
  if (fault == RowFault::kIndptr) {
    FLASHINFER_THROW(ArgumentError) << op << ": kv_indptr[" << batch << "] to kv_indptr[" << batch + 1
                                    << "] must be within 0 to " << t.num_indices << " (the length of kv_indices), got "
                                    << begin << " to " << end;
  }
  if (fault == RowFault::kPosition) {
    FLASHINFER_THROW(ArgumentError) << op << ": positions[" << row << "] must be 0 to "
                                    << (end - begin) * t.page_size - 1 << " (request " << batch << " has "
                                    << end - begin << " pages of " << t.page_size << " tokens), got " << position;
  }
  const int64_t index = begin + position / t.page_size;
  FLASHINFER_THROW(ArgumentError) << op << ": kv_indices[" << index << "] must be 0 to " << t.num_pages - 1
                                  << " (the cache has " << t.num_pages << " pages), got " << t.kv_indices[index];
}

/// Throw for the first row that has no slot, before anything is written. The tables are in host memory.
inline void CheckRows(const char* op, const PageTable& t) {
  for (int64_t row = 0; row < t.num_rows; ++row) {
    Slot slot;
    const RowFault fault = FindSlot(t, row, &slot);
    if (fault != RowFault::kNone) FailRow(op, t, row, fault);
  }
}

#ifdef FLASHINFER_CPU
/// Validate the tables, always: a few nanoseconds per row, compared with hundreds for the copy of the row.
inline void Validate(const char* op, const PageTable& table, bool, Stream) { CheckRows(op, table); }
#else
/// Validate the tables if `validate`: copies them to the host and waits, which a captured stream does not allow.
inline void Validate(const char* op, PageTable table, bool validate, Stream stream) {
  if (!validate) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CheckStatus(op, cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  std::vector<int32_t> host(2 * table.num_rows + table.num_indices + table.batch_size + 1);
  int32_t* next = host.data();
  for (auto [pointer, size] :
       {std::pair{&table.batch_indices, table.num_rows}, std::pair{&table.positions, table.num_rows},
        std::pair{&table.kv_indices, table.num_indices}, std::pair{&table.kv_indptr, table.batch_size + 1}}) {
    CheckStatus(op, cudaMemcpyAsync(next, *pointer, size * sizeof(int32_t), cudaMemcpyDeviceToHost, stream));
    *pointer = next;
    next += size;
  }
  CheckStatus(op, cudaStreamSynchronize(stream));
  CheckRows(op, table);
}
#endif

inline int64_t ItemBytes(const TensorView& t) { return t.dtype().bits * t.dtype().lanes / 8; }

inline SlotStride Scaled(SlotStride s, int64_t factor) { return {s.page * factor, s.entry * factor, s.head * factor}; }

}  // namespace page
}  // namespace flashinfer
