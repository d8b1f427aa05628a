// SPDX-License-Identifier: Apache-2.0
// Keys of multi-head latent attention from their two parts, on CUDA (layout and parameters: concat_mla.h).
// A thread moves one word: 16 bytes where everything is aligned to that, one element otherwise. A block of 192 threads
// writes whole heads, 16 or 8 of them, or 1 element by element. Bound by DRAM: the writes and nope; rope stays in L2.
// In large batches a block brings the nope of a later token into L2.
//   test  pytest tests/concat_ops      bench  python benchmarks/bench_concat_ops.py
#pragma once
#include "concat_mla.h"
#include "ptx/prefetch.cuh"
#include "utils.cuh"

namespace flashinfer {
namespace concat_mla {

constexpr int THREADS = 192;

/// Layout of the words of a token over blocks.
template <typename Word, int ELEMENT_SIZE>
struct Tile {
  static constexpr int NOPE_WORDS = MLA_NOPE_DIM * ELEMENT_SIZE / int(sizeof(Word));
  static constexpr int K_WORDS = MLA_K_DIM * ELEMENT_SIZE / int(sizeof(Word));
  static constexpr int HEADS = THREADS / K_WORDS;   // heads per block
  static constexpr int BLOCKS = MLA_HEADS / HEADS;  // blocks per token; a power of two, so that no division is left
  static constexpr int NOPE_BYTES = NOPE_WORDS * int(sizeof(Word));          // bytes per head
  static constexpr int TOKENS_AHEAD = (5 << 19) / (MLA_HEADS * NOPE_BYTES);  // prefetch distance in tokens: 2.5 MB
  static_assert(HEADS * K_WORDS == THREADS && BLOCKS * HEADS == MLA_HEADS, "blocks cover a token exactly");
};

template <typename Word, int ELEMENT_SIZE, bool PREFETCH>
__global__ void __launch_bounds__(THREADS) ConcatMlaKKernel(const __grid_constant__ ConcatMlaKParams p) {
  using T = Tile<Word, ELEMENT_SIZE>;
  const int64_t token = blockIdx.x / T::BLOCKS;
  const int64_t head = blockIdx.x % T::BLOCKS * T::HEADS + threadIdx.y;
  const int word = threadIdx.x;
  const char* nope = p.nope + token * p.nope_token_stride + head * p.nope_head_stride;
  const char* rope = p.rope + token * p.rope_token_stride - T::NOPE_BYTES;
  const Word value = reinterpret_cast<const Word*>(word < T::NOPE_WORDS ? nope : rope)[word];
  if constexpr (PREFETCH) {
    const bool dense = p.nope_head_stride == T::NOPE_BYTES;  // one thread prefetches all heads of the block
    if (threadIdx.x == 0 && (threadIdx.y == 0 || !dense) && token + T::TOKENS_AHEAD < p.num_tokens) {
      ptx::PrefetchL2(nope + T::TOKENS_AHEAD * p.nope_token_stride, T::NOPE_BYTES * (dense ? T::HEADS : 1));
    }
  }
  reinterpret_cast<Word*>(p.k + token * p.k_token_stride + head * p.k_head_stride)[word] = value;
}

template <typename Word, int ELEMENT_SIZE>
cudaError_t Run(const ConcatMlaKParams& p, cudaStream_t stream) {
  using T = Tile<Word, ELEMENT_SIZE>;
  const int64_t blocks = p.num_tokens * T::BLOCKS;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 block(T::K_WORDS, T::HEADS);
  auto kernel = ConcatMlaKKernel<Word, ELEMENT_SIZE, false>;
  if constexpr (sizeof(Word) == 16) {
    if (p.num_tokens >= 2 * T::TOKENS_AHEAD) kernel = ConcatMlaKKernel<Word, ELEMENT_SIZE, true>;
  }
  return Launch(kernel, dim3(blocks), block, false, stream, p);
}

inline bool IsAlignedTo16(const ConcatMlaKParams& p) {
  const int64_t strides =
      p.k_token_stride | p.k_head_stride | p.nope_token_stride | p.nope_head_stride | p.rope_token_stride;
  return strides % 16 == 0 && IsAligned(p.k, 16) && IsAligned(p.nope, 16) && IsAligned(p.rope, 16);
}

}  // namespace concat_mla

FLASHINFER_INLINE Status ConcatMlaK(const ConcatMlaKParams& p, Stream stream) {
  using namespace concat_mla;
  if (p.num_tokens == 0) return cudaSuccess;
  const bool aligned = IsAlignedTo16(p);
  if (p.element_size == 2) return aligned ? Run<uint4, 2>(p, stream) : Run<uint16_t, 2>(p, stream);
  return aligned ? Run<uint4, 1>(p, stream) : Run<uint8_t, 1>(p, stream);
}

}  // namespace flashinfer
