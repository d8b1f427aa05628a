// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of experts (multi-LoRA): products of one row and the matrix of its (adapter, expert). Parameters
// and entries, shared by both backends; sums are fp32.
//   shrink   y[s, p] += A[s, adapter, expert of p] x[row of p]
//   expand   y[p, columns of s]  = scale * B[s, adapter, expert of p] x[s, p]                         one row per pair
//            y[t, columns of s] += scale * sum over the pairs p of t, in their order, of weight_p * B x[s, p]   finalize
// A matrix is found by address, `w_ptr[s, e]` being that of adapter 0, or in a bank; adapter l is l * lora_stride
// elements further. A pair without adapter, with a token, an expert or an adapter out of range, without a row or without
// a matrix is skipped.
// Defined in moe/lora.cuh (CUDA) and moe/cpu/lora.h (CPU).
//   test  pytest tests/fused_moe/test_bgmv_moe.py      bench  python benchmarks/bench_bgmv_moe.py
#pragma once
#include <cstdint>

#include "../backend.h"
#include "../host_device.h"

namespace flashinfer {

enum class BgmvFloat : int32_t { kFloat = 0, kHalf = 1, kBfloat = 2 };

/// Numbers whose type is known at run time: there are few of them beside the elements of the matrices.
struct BgmvNumbers {
  void* data;
  BgmvFloat type;
};

/// A list of int32 or int64 numbers, or none.
struct BgmvIndices {
  const void* data;
  bool is_wide;  ///< int64

  FLASHINFER_HD bool exists() const { return data != nullptr; }
  FLASHINFER_HD int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// The matrix of each pair.
struct BgmvPairs {
  const int64_t* w_ptr;    ///< (slices, experts) addresses, 0: no matrix; null: there is one slice, in `bank`
  const void* bank;        ///< the matrix of adapter 0 and expert 0
  int64_t expert_stride;   ///< elements between experts of `bank`
  int64_t lora_stride;     ///< elements between adapters
  BgmvIndices token_ids;   ///< (pairs,); none: pairs t * top_k ... (t + 1) * top_k - 1 are those of token t
  BgmvIndices expert_ids;  ///< (pairs,)
  BgmvIndices lora_ids;    ///< (tokens,); negative: no adapter
  BgmvIndices rows;        ///< (pairs,) row of x of each pair, negative: skipped; or none
  int64_t pairs, tokens, experts, slices, top_k;
  int64_t loras;     ///< adapters of the matrices; INT64_MAX if unknown
  int64_t num_rows;  ///< `rows` are less than this; any positive number without `rows`

  FLASHINFER_HD int64_t Token(int64_t pair) const {
    return token_ids.exists() ? token_ids[pair] : int64_t(uint32_t(pair) / uint32_t(top_k));  // fewer than 2^31 pairs
  }

  FLASHINFER_HD bool IsLora(int64_t lora) const { return lora >= 0 && lora < loras; }

  /// Return the matrix of a pair whose token has adapter `lora`, or null if the pair is skipped.
  template <typename W>
  FLASHINFER_HD const W* MatrixOf(int64_t slice, int64_t pair, int64_t lora) const {
    const int64_t expert = expert_ids[pair], row = rows.exists() ? rows[pair] : 0;  // both loads before a branch
    if (expert < 0 || expert >= experts || row < 0 || row >= num_rows) return nullptr;
    const W* const first = w_ptr == nullptr ? static_cast<const W*>(bank) + expert * expert_stride
                                            : reinterpret_cast<const W*>(w_ptr[slice * experts + expert]);
    return IsLora(lora) && first != nullptr ? first + lora * lora_stride : nullptr;
  }

  /// Tell whether a pair has token, expert, row and adapter: then another table may have a matrix where this has none.
  FLASHINFER_HD bool IsPair(int64_t pair) const {
    const int64_t token = Token(pair), expert = expert_ids[pair], row = rows.exists() ? rows[pair] : 0;
    if (token < 0 || token >= tokens || expert < 0 || expert >= experts || row < 0 || row >= num_rows) return false;
    return IsLora(lora_ids[token]);
  }

  /// Return the matrix of a pair, or null if the pair is skipped.
  template <typename W>
  FLASHINFER_HD const W* Matrix(int64_t slice, int64_t pair) const {
    const int64_t token = Token(pair);
    return token < 0 || token >= tokens ? nullptr : MatrixOf<W>(slice, pair, lora_ids[token]);
  }
};

struct BgmvShrinkParams {
  BgmvPairs by;
  BgmvNumbers y;    ///< (slices, pairs, rank), contiguous
  const void* x;    ///< (rows, columns), the type of the matrices
  bool x_per_pair;  ///< the row of a pair is its number; false: that of `by.rows`, or its token
  int64_t x_stride;
  int64_t rank, columns;
  bool overwrites;  ///< y = instead of y +=, and 0 for a pair that has no matrix; that of other skipped pairs is left
                    ///< alone, because no expand reads it
  bool enable_pdl;

  FLASHINFER_HD int64_t Row(int64_t pair) const {
    return x_per_pair ? pair : by.rows.exists() ? by.rows[pair] : by.Token(pair);
  }
};

struct BgmvExpandParams {
  BgmvPairs by;
  BgmvNumbers y;  ///< (pairs, y_columns) or, finalize, (tokens, y_columns)
  int64_t y_stride, y_columns;
  BgmvNumbers x;                ///< (slices, pairs, rank), contiguous
  int64_t x_slice_stride;       ///< elements between slices; 0: slices share x
  const float* weights;         ///< finalize: (pairs,); null is 1
  const int64_t* slice_starts;  ///< (slices,) first column of each slice; null: start + slice * columns. Columns
                                ///< outside of y are not written
  int64_t start;
  const int64_t* order;    ///< finalize: pairs by token; null: those that `by.token_ids` tells
  const int64_t* offsets;  ///< finalize: (tokens + 1,), where the pairs of a token begin in `order`
  int64_t rank, columns;
  int64_t zero_columns;  ///< with `overwrites`: columns after the last slice, which are zero
  float scale;
  bool finalize;
  bool overwrites;  ///< y = instead of y +=, and rows without a pair that is not skipped are zero
  bool enable_pdl;

  FLASHINFER_HD int64_t ColumnOf(int64_t slice, int64_t column) const {
    return (slice_starts == nullptr ? start + slice * columns : slice_starts[slice]) + column;
  }
  /// Return the columns that a slice writes.
  FLASHINFER_HD int64_t Width(int64_t slice) const { return columns + (slice + 1 == by.slices ? zero_columns : 0); }
};

/// W is float16_t or bfloat16_t.
template <typename W>
Status BgmvMoeShrink(const BgmvShrinkParams& params, Stream stream);
template <typename W>
Status BgmvMoeExpand(const BgmvExpandParams& params, Stream stream);

}  // namespace flashinfer
