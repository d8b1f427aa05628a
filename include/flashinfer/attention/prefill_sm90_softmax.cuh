// SPDX-License-Identifier: Apache-2.0
// Softmax of the Hopper prefill kernel: from scores to weights, for the two rows of a thread.
//
// Thread t of a warpgroup, lane l, has rows 16 (t / 32) + l / 4 and the one 8 below of the warpgroup's 64. Of a step it
// has keys 8 n + 2 (l % 4) + {0, 1} of them, in s[4 n], s[4 n + 1] and s[4 n + 2], s[4 n + 3] (ptx/wgmma.cuh).
#pragma once
#include "mask_bits.cuh"
#include "prefill_sm90_traits.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Tr, typename Variant, bool ALL_MASKED>
struct Softmax {
  using Params = typename Tr::Params;
  static constexpr int SCORES = Tr::KEYS / 2;  // registers of a thread
  /// True if the visible pairs of a step are found as words of 64 bits.
  static constexpr bool BY_WORDS = ALL_MASKED && (HAS_MASK_BITS<Variant> || HasItems<Params>::value);

  const Params& p;
  const WorkItem& item;
  Variant variant;
  int row[2];                // rows of the thread in the request
  float m[2], d[2];          // exponent and sum of the weights of a row; lanes hold parts of the sum
  float scale[2];            // factor of the sums so far, where the exponent has grown
  int full_begin, full_end;  // range of keys that all rows of the warpgroup see

  __device__ __forceinline__ Softmax(const Params& p, const WorkItem& item, int group)
      : p(p), item(item), variant(p, item.request, nullptr) {
    const int first = item.row_begin + 64 * group;
    row[0] = first + int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
    row[1] = row[0] + 8;
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    full_begin = mask.First(TokenOf(first + 63));
    full_end = min(mask.End(TokenOf(first)), item.kv_end);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m[i] = -math::inf;
      d[i] = 0.f;
      float factor = 1.f;
      if (item.is_first) variant.update_m_d(p, 0, HeadOf(row[i]), m[i], d[i], factor);
      if (threadIdx.x % 4 != 0) d[i] = 0.f;  // the lanes of a row are summed at the end
    }
  }

  /// Token and query head of a row. Padding rows have the last token.
  __device__ __forceinline__ int TokenOf(int row) const { return min(int(p.group.Divide(row)), item.qo_len - 1); }
  __device__ __forceinline__ int HeadOf(int row) const {
    return item.kv_head * int(p.group.divisor) + row - int(p.group.Divide(row)) * int(p.group.divisor);
  }
  __device__ __forceinline__ bool Exists(int row) const { return row < item.qo_len * int(p.group.divisor); }

  /// Return true if some rows of the warpgroup do not see some of the keys from `key` on.
  __device__ __forceinline__ bool IsMasked(int key) const {
    return ALL_MASKED || key < full_begin || key + Tr::KEYS > full_end;
  }

  /// Turn the scores of the keys from `key` on into weights, in place. Returns true if the sums so far must be
  /// multiplied by `scale`.
  template <bool MASKED>
  __device__ __forceinline__ bool Weigh(float (&s)[SCORES], int key) {
    Transform<MASKED>(s, key);
    if constexpr (Variant::use_softmax) {
      const bool grown = Rebase(s);
      Exponentiate(s);
      return grown;
    } else {
      return false;
    }
  }

  /// Round weights to the A fragments of wgmma: 16 keys are 4 registers, in the order of the scores.
  static __device__ __forceinline__ void Round(uint32_t (&w)[Tr::KEYS / 16][4], const float (&s)[SCORES]) {
#pragma unroll
    for (int k = 0; k < Tr::KEYS / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[k][i] = Pack<typename Tr::T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  }

  __device__ __forceinline__ void SumLanes() {
#pragma unroll
    for (int i = 0; i < 2; ++i) d[i] = GroupSum(d[i], 4);
  }

 private:
  /// Apply the hooks to the logits, and set invisible pairs to -inf (0 without softmax).
  template <bool MASKED>
  __device__ __forceinline__ void Transform(float (&s)[SCORES], int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!HOOKS_ACCEPT_PADDING<Variant> && !Exists(row[i])) continue;  // padding rows are never read
      if constexpr (BY_WORDS && MASKED) {
        TransformByWords(s, i, key);
      } else {
        TransformByRange<MASKED>(s, i, key);
      }
    }
  }

  __device__ __forceinline__ void Hook(float& x, [[maybe_unused]] bool exists, int token, int key, int head) {
    if (HOOKS_ACCEPT_PADDING<Variant> || exists) {
      x = variant.LogitsTransform(p, x, item.request, token, key, head, item.kv_head);
    }
  }

  template <bool MASKED>
  __device__ __forceinline__ void TransformByRange(float (&s)[SCORES], int i, int key) {
    const int token = TokenOf(row[i]), head = HeadOf(row[i]), own = key + 2 * int(threadIdx.x % 4);
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    const int first = MASKED ? mask.First(token) - own : 0;
    const int end = MASKED ? min(mask.End(token), item.kv_end) - own : 0, room = item.kv_end - own;
#pragma unroll
    for (int n = 0; n < Tr::KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int offset = 8 * n + j;
        float& x = s[4 * n + 2 * i + j];
        Hook(x, !MASKED || offset < room, token, own + offset, head);
        if constexpr (MASKED) {
          const bool visible = offset >= first && offset < end &&
                               variant.LogitsMask(p, item.request, token, own + offset, head, item.kv_head);
          if (!visible) x = Variant::use_softmax ? -math::inf : 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void TransformByWords(float (&s)[SCORES], int i, int key) {
    const int token = TokenOf(row[i]), head = HeadOf(row[i]), c = 2 * int(threadIdx.x % 4);
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    const int first = mask.First(token), end = min(mask.End(token), item.kv_end);
    uint64_t bits = 0;
#pragma unroll
    for (int n = 0; n < Tr::KEYS / 8; ++n) {
      if (n % 8 == 0) bits = VisibleWord(token, key + 8 * n, first, end) >> c;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int own = key + 8 * n + c + j;
        float& x = s[4 * n + 2 * i + j];
        Hook(x, own < item.kv_end, token, own, head);
        bool visible = (bits >> (n % 8 * 8 + j) & 1) != 0;
        if constexpr (!HAS_MASK_BITS<Variant>) {
          visible = visible && variant.LogitsMask(p, item.request, token, own, head, item.kv_head);
        }
        if (!visible) x = Variant::use_softmax ? -math::inf : 0.f;
      }
    }
  }

  /// Visibility of the 64 keys from `key` on to a token that sees keys [first, end) but for masks.
  __device__ __forceinline__ uint64_t VisibleWord(int token, int key, int first, int end) const {
    uint64_t bits = RangeBits(first - key, end - key);
    if constexpr (HAS_MASK_BITS<Variant>) {
      if (variant.custom_mask_ptr != nullptr) {
        bits &= MaskBits(variant.custom_mask_ptr, item.kv_len, token, key, min(64, item.kv_len - key));
      }
    }
    if (p.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
      const ItemBounds items(p, item.request, item.qo_len, item.kv_len, token);
      bits &= RangeBits(0, items.prefix - key) | RangeBits(items.first - key, 64);
    }
    return bits;
  }

  /// Raise m where it lags behind the largest logit by more than MAX_LAG: only then do the lanes of a row exchange their
  /// maxima, and are sums rescaled. The branch is taken by whole warps.
  __device__ __forceinline__ bool Rebase(const float (&s)[SCORES]) {
    float top[2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
      for (int n = 1; n < Tr::KEYS / 8; ++n) x = fmaxf(x, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      top[i] = x * variant.sm_scale_log2;
      grown = grown || top[i] > m[i] + MAX_LAG<Variant>;
    }
    if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
      const float next = fmaxf(m[i], top[i]);
      scale[i] = next == -math::inf ? 1.f : ptx::Exp2(m[i] - next);
      m[i] = next;
      d[i] *= scale[i];
    }
    return true;
  }

  __device__ __forceinline__ void Exponentiate(float (&s)[SCORES]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = m[i] == -math::inf ? 0.f : m[i];
#pragma unroll
      for (int n = 0; n < Tr::KEYS / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[4 * n + 2 * i + j];
          x = ptx::Exp2(fmaf(x, variant.sm_scale_log2, -base));
          d[i] += x;
        }
      }
    }
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
