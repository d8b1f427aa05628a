// SPDX-License-Identifier: Apache-2.0
// Packed custom masks, read one word at a time, and the steps of a tile that they hide or leave unmasked.
#pragma once
#include "tile.cuh"

namespace flashinfer {
namespace attention {

/// True if the variant's mask is the packed one that `MaskBits` reads.
template <typename Variant>
inline constexpr bool HAS_MASK_BITS = false;
template <bool SLIDING_WINDOW, bool SOFT_CAP, bool ALIBI>
inline constexpr bool HAS_MASK_BITS<DefaultAttention<true, SLIDING_WINDOW, SOFT_CAP, ALIBI>> = true;

/// Visibility of keys [key, key + count), count <= 64, to a query token; other bits are 0. `mask` has qo_len x kv_len
/// bits. Reads only aligned words that hold at least one of the bits, and no byte after the mask.
__device__ __forceinline__ uint64_t MaskBits(const uint8_t* mask, int qo_len, int kv_len, int qo_idx, int key,
                                             int count) {
  if (count <= 0) return 0;
  const int64_t bit = int64_t(qo_idx) * kv_len + key;
  const uintptr_t address = reinterpret_cast<uintptr_t>(mask + (bit >> 3));
  const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(address & ~uintptr_t{3});
  const int shift = int(address & 3) * 8 + int(bit & 7), needed = (shift + count + 31) / 32;
  const int left = int(min(int64_t(mask + ((int64_t(qo_len) * kv_len + 7) / 8) - bytes), int64_t{4} * needed));
  uint32_t words[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) words[i] = 4 * i + 4 <= left ? reinterpret_cast<const uint32_t*>(bytes)[i] : 0;
  if (left < 4 * needed) {  // the mask has up to three bytes of the last word
    uint32_t last = 0;
#pragma unroll 1
    for (int at = left - 1; at >= 4 * needed - 4; --at) last = last << 8 | bytes[at];
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = i == needed - 1 ? last : words[i];
  }
  const uint64_t bits =
      uint64_t(__funnelshift_r(words[0], words[1], shift)) | uint64_t(__funnelshift_r(words[1], words[2], shift)) << 32;
  return count < 64 ? bits & ((uint64_t{1} << count) - 1) : bits;
}

/// Mask of the bits [begin, end) of 64; both may lie outside of the word.
__device__ __forceinline__ uint64_t RangeBits(int begin, int end) {
  const uint64_t from = begin < 64 ? ~uint64_t{0} << max(begin, 0) : 0;
  return end < 64 ? from & ((uint64_t{1} << max(end, 0)) - 1) : from;
}

/// Classification of each step of keys: is any pair of the tile visible, are all? Steps beyond the table count as
/// mixed.
struct MaskClasses {
  static constexpr int BYTES = 1024;
  uint8_t* table;
  int start, keys, known = 0;
  bool no_mask = false;

  __device__ __forceinline__ MaskClasses(uint8_t* table, int start, int keys)
      : table(table), start(start), keys(keys) {}

  /// Fill the table; called by all threads of the block. Tokens [first, last] are those of the tile.
  __device__ __forceinline__ void Classify(const uint8_t* mask, const WorkItem& item, int first, int last) {
    no_mask = mask == nullptr;
    if (no_mask) return;
    known = min(BYTES, (item.kv_end - item.kv_start + keys - 1) / keys);
    for (int step = threadIdx.x; step < known; step += blockDim.x) {
      const int key = start + step * keys, count = min(keys, item.kv_len - key);
      const uint64_t whole = count < 64 ? (uint64_t{1} << max(count, 0)) - 1 : ~uint64_t{0};
      uint64_t any = 0, all = whole;
#pragma unroll 4
      for (int token = first; token <= last; ++token) {
        const uint64_t bits = MaskBits(mask, item.qo_len, item.kv_len, token, key, count);
        any |= bits;
        all &= bits;
      }
      table[step] = (any != 0 ? 1 : 0) | (all == whole ? 2 : 0);
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool IsEmpty(int token) const {
    const int step = (token - start) / keys;
    return step < known && (table[step] & 1) == 0;
  }
  __device__ __forceinline__ bool IsFull(int token) const {
    const int step = (token - start) / keys;
    return no_mask || (step < known && (table[step] & 2) != 0);
  }
};

}  // namespace attention
}  // namespace flashinfer
