// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of experts (multi-LoRA): products of one row and the matrix of its (adapter, expert). Parameters
// and entries, shared by both backends; sums are fp32.
//   shrink   y[s, p] += A[s, adapter, expert of p] x[row of p]
//   expand   y[p, columns of s]  = scale * B[s, adapter, expert of p] x[s, p]                         one row per pair
//            y[t, columns of s] += scale * sum over the pairs p of t, in their order, of weight_p * B x[s, p]   finalize
// Matrices are found by address: `w_ptr[s, e]` is that of adapter 0, and adapter l is l * lora_stride elements further.
// A pair without adapter, or with a token or an expert out of range, is skipped.
// Defined in bgmv_moe.cuh (CUDA) and bgmv_moe_cpu.h (CPU).
//   test  pytest tests/fused_moe/test_bgmv_moe.py      bench  python benchmarks/bench_bgmv_moe.py
#pragma once
#include <cstdint>

#include "backend.h"
#include "host_device.h"

namespace flashinfer {

enum class BgmvFloat : int32_t { kFloat = 0, kHalf = 1, kBfloat = 2 };

/// Numbers whose type is known at run time: there are few of them beside the elements of the matrices.
struct BgmvNumbers {
  void* data;
  BgmvFloat type;
};

/// The matrix of each pair.
struct BgmvPairs {
  const int64_t* w_ptr;       ///< (slices, experts) addresses
  const int64_t* token_ids;   ///< (pairs,)
  const int64_t* expert_ids;  ///< (pairs,)
  const int64_t* lora_ids;    ///< (tokens,); negative: no adapter
  int64_t lora_stride;        ///< elements between adapters
  int64_t pairs, tokens, experts, slices;

  /// Return the matrix of a pair, or null if the pair is skipped.
  template <typename W>
  FLASHINFER_HD const W* Matrix(int64_t slice, int64_t pair) const {
    const int64_t token = token_ids[pair], expert = expert_ids[pair];
    if (token < 0 || token >= tokens || expert < 0 || expert >= experts) return nullptr;
    const int64_t lora = lora_ids[token];
    if (lora < 0) return nullptr;
    return reinterpret_cast<const W*>(w_ptr[slice * experts + expert]) + lora * lora_stride;
  }
};

struct BgmvShrinkParams {
  BgmvPairs by;
  BgmvNumbers y;          ///< (slices, pairs, rank), contiguous
  const void* x;          ///< (rows, columns), the type of the matrices
  const int64_t* x_rows;  ///< (pairs,) row of each pair, negative: skipped; null: the pair's number
  int64_t x_stride;
  int64_t rank, columns;
};

struct BgmvExpandParams {
  BgmvPairs by;
  BgmvNumbers y;  ///< (pairs, ...) or, finalize, (tokens, ...)
  int64_t y_stride;
  BgmvNumbers x;                ///< (slices, pairs, rank), contiguous
  const float* weights;         ///< finalize: (pairs,); null is 1
  const int64_t* slice_starts;  ///< (slices,) first column of each slice
  const int64_t* order;         ///< finalize: pairs by token; null: pairs t * top_k ... are those of token t
  const int64_t* offsets;       ///< finalize: (tokens + 1,), where the pairs of a token begin in `order`
  int64_t top_k;
  int64_t rank, columns;
  float scale;
  bool finalize;
};

/// W is float16_t or bfloat16_t.
template <typename W>
Status BgmvMoeShrink(const BgmvShrinkParams& params, Stream stream);
template <typename W>
Status BgmvMoeExpand(const BgmvExpandParams& params, Stream stream);

}  // namespace flashinfer
