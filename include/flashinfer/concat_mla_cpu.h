// SPDX-License-Identifier: Apache-2.0
// Keys of multi-head latent attention from their two parts, on the CPU (layout and parameters: concat_mla.h).
// Two copies of a fixed size per head, which the compiler turns into register moves; tokens over threads.
//   test  pytest tests/concat_ops      bench  python benchmarks/bench_concat_ops.py
#pragma once
#include <cstdint>
#include <cstring>

#include "concat_mla.h"
#include "cpu/parallel.h"

namespace flashinfer {
namespace cpu {

template <int ELEMENT_SIZE>
inline void ConcatMlaKTokens(const ConcatMlaKParams& p) {
  constexpr size_t NOPE_BYTES = MLA_NOPE_DIM * ELEMENT_SIZE, ROPE_BYTES = MLA_ROPE_DIM * ELEMENT_SIZE;
  ParallelFor(p.num_tokens, MLA_HEADS * MLA_K_DIM, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      char rope[ROPE_BYTES];  // local copy: the compiler knows that writes to k do not change it
      std::memcpy(rope, p.rope + t * p.rope_token_stride, ROPE_BYTES);
      char* k = p.k + t * p.k_token_stride;
      const char* nope = p.nope + t * p.nope_token_stride;
      for (int h = 0; h < MLA_HEADS; ++h, k += p.k_head_stride, nope += p.nope_head_stride) {
        std::memcpy(k, nope, NOPE_BYTES);
        std::memcpy(k + NOPE_BYTES, rope, ROPE_BYTES);
      }
    }
  });
}

}  // namespace cpu

inline Status ConcatMlaK(const ConcatMlaKParams& p, Stream) {
  p.element_size == 2 ? cpu::ConcatMlaKTokens<2>(p) : cpu::ConcatMlaKTokens<1>(p);
  return 0;
}

}  // namespace flashinfer
