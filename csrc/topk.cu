// SPDX-License-Identifier: Apache-2.0
// Launchers of top-k selection: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/topk.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/topk_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/topk.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

/// Arguments of all functions: input, k, order, and settings of the CUDA kernel.
struct Common {
  const char* op;
  const char* name;  ///< name of the input argument
  const TensorView& input;
  int64_t k, order;
  bool prefer_large_indices;
  int64_t capacity, blocks_per_row;
};

/// Validate a contiguous int32 tensor with one number for each of `count` rows; null if it is not given.
const int32_t* RowNumbers(const Common& c, const char* name, const Optional<TensorView>& t, int64_t count) {
  if (!t.has_value()) return nullptr;
  const std::string because = std::string(c.name) + ".shape[0]" + (count == c.input.size(0) ? "" : " / next_n");
  Expect(c.op, name, *t)
      .same_device(c.input, c.name)
      .dtype({dl_int32})
      .rank(1)
      .dim(0, count, because.c_str())
      .contiguous();
  return (*t).data_ptr<int32_t>();
}

/// Validate an output (rows, k); null if it is not given.
template <typename T>
T* Output(const Common& c, const char* name, const Optional<TensorView>& t, DLDataType dtype) {
  if (!t.has_value()) return nullptr;
  Expect(c.op, name, *t)
      .same_device(c.input, c.name)
      .dtype({dtype})
      .rank(2)
      .dim(0, c.input.size(0), "rows")
      .dim(1, c.k, "k")
      .contiguous()
      .apart(c.input, c.name);
  return static_cast<T*>((*t).data_ptr());
}

#ifdef FLASHINFER_CPU  // CUDA kernels write -1 for columns beyond the page table: a check would have to synchronise
/// Validate that the page table has all columns of all windows.
template <typename T>
void CheckPageTable(const char* op, const TopKParams<T>& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int32_t length = WindowOf(p, row).length;
    if (length == 0) continue;
    const PageTableEntry first = PageTableEntryOf(p, row, 0), last = PageTableEntryOf(p, row, length - 1);
    if (HasEntry(p, first) && HasEntry(p, last)) continue;
    FLASHINFER_THROW(ArgumentError) << op << ": the window of row " << row
                                    << " must be within the shape of src_page_table (" << p.page_table_rows << ", "
                                    << p.page_table_width << "), got row " << first.row << ", columns " << first.column
                                    << " to " << last.column;
  }
}
#endif

template <typename Fill>
void Run(const Common& c, const Fill& fill) {
  Expect(c.op, c.name, c.input).on_device().rank(2).dtype({dl_float32, dl_float16, dl_bfloat16}).last_dim_contiguous();
  if (c.input.size(1) > int64_t{1} << 30) {
    FLASHINFER_THROW(ArgumentError) << c.op << ": " << c.name << ".shape[1] must be at most 2^30, got "
                                    << c.input.size(1);
  }
  if (c.k > INT32_MAX) {
    FLASHINFER_THROW(ArgumentError) << c.op << ": k must be less than 2^31, got " << c.k;
  }
  DispatchFloat(c.input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopKParams<T> p{};
    p.input = c.input.data_ptr<T>();
    p.row_stride = c.input.stride(0);
    p.rows = c.input.size(0);
    p.width = int32_t(c.input.size(1));
    p.k = int32_t(c.k);
    p.order = TopKOrder(c.order);
    p.prefer_large_indices = c.prefer_large_indices;
    p.capacity = int32_t(c.capacity);
    p.blocks_per_row = int32_t(c.blocks_per_row);
    fill(p);
    p.enable_pdl = UsePdl(true, c.input.device());
    DeviceGuard guard(c.input.device());
    CheckStatus(c.op, TopK<T>(p, get_stream(c.input.device())));
  });
}

}  // namespace

void top_k(TensorView values, TensorView indices, TensorView input, int64_t k, int64_t order, bool prefer_large_indices,
           int64_t capacity, int64_t blocks_per_row) {
  const Common c{"top_k", "input", input, k, order, prefer_large_indices, capacity, blocks_per_row};
  Run(c, [&](auto& p) {
    p.values = Output<std::remove_pointer_t<decltype(p.values)>>(c, "values", values, input.dtype());
    p.indices = Output<int64_t>(c, "indices", indices, dl_int64);
  });
}

void top_k_page_table_transform(TensorView out, Optional<TensorView> out_raw_indices, TensorView input,
                                TensorView src_page_table, TensorView lengths, Optional<TensorView> row_to_batch,
                                Optional<TensorView> row_starts, Optional<TensorView> page_table_row_starts, int64_t k,
                                int64_t page_shift, int64_t order, bool prefer_large_indices, int64_t capacity,
                                int64_t blocks_per_row) {
  const char* op = "top_k_page_table_transform";
  const Common c{op, "input", input, k, order, prefer_large_indices, capacity, blocks_per_row};
  Run(c, [&](auto& p) {
    Expect(op, "src_page_table", src_page_table)
        .same_device(input, "input")
        .dtype({dl_int32})
        .rank(2)
        .last_dim_contiguous();
    p.page_table = src_page_table.data_ptr<int32_t>();
    p.page_table_stride = src_page_table.stride(0);
    p.page_table_rows = src_page_table.size(0);
    p.page_table_width = src_page_table.size(1);
    p.page_shift = int32_t(page_shift);
    p.lengths = RowNumbers(c, "lengths", lengths, p.rows);
    p.row_to_batch = RowNumbers(c, "row_to_batch", row_to_batch, p.rows);
    p.row_starts = RowNumbers(c, "row_starts", row_starts, p.rows);
    p.page_table_row_starts = RowNumbers(c, "page_table_row_starts", page_table_row_starts, p.rows);
    p.transformed = Output<int32_t>(c, "out", out, dl_int32);
    for (auto [name, t] : {std::pair{"src_page_table", &src_page_table}, std::pair{"lengths", &lengths}}) {
      Expect(op, "out", out).apart(*t, name);
    }
    Expect(op, "out", out).apart(row_to_batch, "row_to_batch").apart(row_starts, "row_starts");
    p.raw_indices = Output<int32_t>(c, "out_raw_indices", out_raw_indices, dl_int32);
#ifdef FLASHINFER_CPU
    CheckPageTable(op, p);
#endif
  });
}

void top_k_ragged_transform(TensorView out, TensorView input, TensorView offsets, TensorView lengths,
                            Optional<TensorView> row_starts, int64_t k, int64_t order, bool prefer_large_indices,
                            int64_t capacity, int64_t blocks_per_row) {
  const Common c{"top_k_ragged_transform", "input", input, k, order, prefer_large_indices, capacity, blocks_per_row};
  Run(c, [&](auto& p) {
    p.offsets = RowNumbers(c, "offsets", offsets, p.rows);
    p.lengths = RowNumbers(c, "lengths", lengths, p.rows);
    p.row_starts = RowNumbers(c, "row_starts", row_starts, p.rows);
    p.transformed = Output<int32_t>(c, "out", out, dl_int32);
  });
}

void top_k_varlen(TensorView out_indices, Optional<TensorView> out_values, TensorView logits, TensorView seq_lens,
                  int64_t k, int64_t compress_ratio, int64_t next_n, int64_t capacity, int64_t blocks_per_row) {
  const char* op = "top_k_varlen";
  if (next_n < 1 || next_n > INT32_MAX || compress_ratio < 1 || compress_ratio > INT32_MAX) {
    FLASHINFER_THROW(ArgumentError) << op << ": next_n and compress_ratio must be at least 1, got " << next_n << " and "
                                    << compress_ratio;
  }
  const Common c{op, "logits", logits, k, int64_t(TopKOrder::kByIndex), false, capacity, blocks_per_row};
  Run(c, [&](auto& p) {
    if (p.rows % next_n != 0) {
      FLASHINFER_THROW(ArgumentError) << op << ": logits.shape[0] must be a multiple of next_n = " << next_n << ", got "
                                      << p.rows;
    }
    p.next_n = int32_t(next_n);
    p.compress_ratio = int32_t(compress_ratio);
    p.lengths = RowNumbers(c, "seq_lens", seq_lens, p.rows / next_n);
    p.transformed = Output<int32_t>(c, "out_indices", out_indices, dl_int32);
    p.values = Output<std::remove_pointer_t<decltype(p.values)>>(c, "out_values", out_values, logits.dtype());
  });
}
