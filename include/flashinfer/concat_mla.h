// SPDX-License-Identifier: Apache-2.0
// Keys of multi-head latent attention from their two parts: parameters and entry, shared by both backends.
//   k[t][h] = nope[t][h] (128 elements) then rope[t] (64 elements, the same for each of the 128 heads)
// A copy of bits, so only the size of an element matters. Defined in concat_mla.cuh (CUDA) and concat_mla_cpu.h (CPU).
//   test  pytest tests/concat_ops      bench  python benchmarks/bench_concat_ops.py
#pragma once
#include "backend.h"

namespace flashinfer {

constexpr int MLA_HEADS = 128, MLA_NOPE_DIM = 128, MLA_ROPE_DIM = 64, MLA_K_DIM = MLA_NOPE_DIM + MLA_ROPE_DIM;

/// Parameters of concat_mla_k. Strides are in bytes; the elements of a head are contiguous.
struct ConcatMlaKParams {
  char* k;
  const char* nope;
  const char* rope;
  int64_t num_tokens;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t nope_token_stride;
  int64_t nope_head_stride;
  int64_t rope_token_stride;
  int element_size;  ///< 1 or 2
};

Status ConcatMlaK(const ConcatMlaKParams& params, Stream stream);

}  // namespace flashinfer
