// SPDX-License-Identifier: Apache-2.0
// Softmax of the Hopper prefill kernel: from scores to weights, for the two rows of a thread.
//
// Thread t of a warpgroup, lane l, has rows 16 (t / 32) + l / 4 and the one 8 below of the warpgroup's 64. Of a step it
// has keys 8 n + 2 (l % 4) + {0, 1} of them, in s[4 n], s[4 n + 1] and s[4 n + 2], s[4 n + 3] (ptx/wgmma.cuh).
#pragma once
#include <climits>

#include "../../ptx/e4m3.cuh"
#include "../common/mask_bits.cuh"
#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// True if the parameters of a module have scales of each head: of queries, keys and values of 8 bits.
template <typename Params, typename = void>
inline constexpr bool HAS_HEAD_SCALES = false;
template <typename Params>
inline constexpr bool HAS_HEAD_SCALES<Params, std::void_t<decltype(Params::maybe_scale_q)>> = true;

/// True if the logits of a variant are products of queries and keys, so that scales of a head multiply the exponent.
template <typename Variant>
inline constexpr bool HAS_PLAIN_LOGITS = false;
template <bool CUSTOM_MASK, bool SLIDING_WINDOW>
inline constexpr bool HAS_PLAIN_LOGITS<DefaultAttention<CUSTOM_MASK, SLIDING_WINDOW, false, false>> = true;

template <typename Tr, typename Variant, bool ALL_MASKED>
struct Softmax {
  using Params = typename Tr::Params;
  static constexpr int SCORES = Tr::KEYS / 2;  // registers of a thread
  /// True if the visible pairs of a step are found as words of 64 bits.
  static constexpr bool BY_WORDS = ALL_MASKED && (HAS_MASK_BITS<Variant> || HasItems<Params>::value);
  /// Weights of 8 bits: where m is raised, the largest weight of a row becomes 2^SHIFT, which is exact. Small ones keep
  /// their precision down to 2^-14 of it. Later weights may be as large as 2^LAG before m is raised again; 448 is the
  /// largest number. So most steps rescale nothing.
  static constexpr bool HAS_FP8_WEIGHTS = sizeof(typename Tr::T) == 1, HAS_LAG = MAX_LAG<Variant> > 0.f;
  static constexpr float SHIFT = HAS_FP8_WEIGHTS && HAS_LAG ? 8.f : 0.f;
  static constexpr float LAG = HAS_FP8_WEIGHTS && HAS_LAG ? 8.75f : MAX_LAG<Variant>;
  /// Most steps without a mask compare scores with a limit of their row, as integers. CHUNK: keys of a step whose
  /// exponents are computed while the exponentials of those before run.
  static constexpr bool HAS_LIMITS = HAS_FP8_WEIGHTS && HAS_LAG;
  static constexpr bool HOLDS_LIMITS = HAS_LIMITS && !Tr::PAGED;  // beside the path of pages, registers would not last
  static constexpr int CHUNK = HAS_FP8_WEIGHTS ? 16 : Tr::KEYS;
  static constexpr bool HAS_SCALES = HAS_HEAD_SCALES<Params> || Tr::SCALES_QUERY;
  static constexpr bool SCALES_LOGITS = HAS_SCALES && !HAS_PLAIN_LOGITS<Variant>;

  const Params& p;
  const WorkItem& item;
  Variant variant;
  int row[2];                     // rows of the thread in the request
  float m[2], d[2];               // exponent and sum of the weights of a row; lanes hold parts of the sum
  float scale[2];                 // factor of the sums so far, where the exponent has grown
  float own[HAS_SCALES ? 2 : 1];  // scales of the rows: of logits (SCALES_LOGITS) or of exponents
  int limit[2];                   // HOLDS_LIMITS: Limit() of the rows
  int full_begin, full_end;       // range of keys that all rows of the warpgroup see

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
      if constexpr (HAS_SCALES) own[i] = HeadScale(HeadOf(row[i])) * (SCALES_LOGITS ? 1.f : variant.sm_scale_log2);
      m[i] = -math::inf;
      d[i] = 0.f;
      float factor = 1.f;
      if (item.is_first) variant.update_m_d(p, 0, HeadOf(row[i]), m[i], d[i], factor);
      if (threadIdx.x % 4 != 0) d[i] = 0.f;  // the lanes of a row are summed at the end
      if constexpr (HOLDS_LIMITS) limit[i] = Limit(i);
    }
  }

  /// Note the inverse of the factors that the queries of the thread's rows were multiplied by (ScaleQuery).
  __device__ __forceinline__ void ScaleBy(const float2& factors) {
    static_assert(HAS_SCALES, "rows have no factors");
    own[0] *= factors.x, own[HAS_SCALES ? 1 : 0] *= factors.y;
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

  /// Return how many of the next `count` steps before `key` all rows of the warpgroup see entirely, until one that they
  /// do not.
  __device__ __forceinline__ int PlainSteps(int key, int count) const {
    return ALL_MASKED || key > full_end || key < full_begin ? 0 : min(count, (key - full_begin) / Tr::KEYS);
  }

  /// Turn the scores of the keys from `key` on into weights, in place. Returns true if the sums so far must be
  /// multiplied by `scale`.
  template <bool MASKED>
  __device__ __forceinline__ bool Weigh(float (&s)[SCORES], int key) {
    const bool grown = BeginWeigh<MASKED>(s, key);
    Exponentiate<0, Tr::KEYS>(s);
    return grown;
  }

  /// Weigh() but for the exponentials.
  template <bool MASKED>
  __device__ __forceinline__ bool BeginWeigh(float (&s)[SCORES], int key) {
    Transform<MASKED>(s, key);
    if constexpr (Variant::use_softmax) {
      return Rebase<MASKED>(s);
    } else {
      return false;
    }
  }

  /// Turn the logits of keys [BEGIN, END) of a step into weights.
  template <int BEGIN, int END>
  __device__ __forceinline__ void Exponentiate(float (&s)[SCORES]) {
    if constexpr (Variant::use_softmax) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float base = m[i] == -math::inf ? 0.f : m[i];
#pragma unroll
        for (int n = BEGIN / 8; n < END / 8; ++n) {
          if constexpr (CHUNK < Tr::KEYS) {
            if (n % (CHUNK / 8) == 0 && n >= CHUNK / 4) base = ptx::After(base, s[4 * (n - CHUNK / 4) + 2 * i]);
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[4 * n + 2 * i + j];
            x = ptx::Exp2(fmaf(x, ExponentScale(i), -base));
            d[i] = HAS_FP8_WEIGHTS ? ptx::AddHere(d[i], x) : d[i] + x;
          }
        }
      }
    }
  }

  /// Round weights to the A fragments of wgmma: 16 keys are 4 registers, in the order of the scores.
  /// 8 bits: 32 keys are 4 registers, in an order that the tiles of values share (producer_transpose.cuh).
  template <int STEPS>
  static __device__ __forceinline__ void Round(uint32_t (&w)[STEPS][4], const float (&s)[SCORES]) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (HAS_FP8_WEIGHTS) {
          const float* x = s + 16 * k + i / 2 * 8 + i % 2 * 2;
          w[k][i] = ptx::E4m3Pairs(x[0], x[1], ptx::E4m3Pair(x[4], x[5]));
        } else {
          w[k][i] = Pack<typename Tr::W>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void SumLanes() {
#pragma unroll
    for (int i = 0; i < 2; ++i) d[i] = GroupSum(d[i], 4);
  }

  /// Scale of the values.
  __device__ __forceinline__ float ValueScale() const {
    if constexpr (HAS_HEAD_SCALES<Params>) {
      if (p.maybe_scale_v != nullptr) return p.maybe_scale_v[item.kv_head];
    }
    return 1.f;
  }

 private:
  __device__ __forceinline__ float HeadScale(int head) const {
    float x = 1.f;
    if constexpr (HAS_HEAD_SCALES<Params>) {
      if (p.maybe_scale_q != nullptr) x = p.maybe_scale_q[head];
      if (p.maybe_scale_k != nullptr) x *= p.maybe_scale_k[item.kv_head];
    }
    return x;
  }
  /// Factor from a logit of row i to an exponent of 2.
  __device__ __forceinline__ float ExponentScale(int i) const {
    return HAS_SCALES && !SCALES_LOGITS ? own[HAS_SCALES ? i : 0] : variant.sm_scale_log2;
  }

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

  __device__ __forceinline__ void Hook(float& x, [[maybe_unused]] int i, [[maybe_unused]] bool exists, int token,
                                       int key, int head) {
    if constexpr (SCALES_LOGITS) x *= own[i];
    if (HOOKS_ACCEPT_PADDING<Variant> || exists) {
      x = variant.LogitsTransform(p, x, item.request, token, key, head, item.kv_head);
    }
  }

  template <bool MASKED>
  __device__ __forceinline__ void TransformByRange(float (&s)[SCORES], int i, int key) {
    const int token = TokenOf(row[i]), head = HeadOf(row[i]), base = key + 2 * int(threadIdx.x % 4);
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    const int first = MASKED ? mask.First(token) - base : 0;
    const int end = MASKED ? min(mask.End(token), item.kv_end) - base : 0, room = item.kv_end - base;
#pragma unroll
    for (int n = 0; n < Tr::KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int offset = 8 * n + j;
        float& x = s[4 * n + 2 * i + j];
        Hook(x, i, !MASKED || offset < room, token, base + offset, head);
        if constexpr (MASKED) {
          const bool visible = offset >= first && offset < end &&
                               variant.LogitsMask(p, item.request, token, base + offset, head, item.kv_head);
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
        const int at = key + 8 * n + c + j;
        float& x = s[4 * n + 2 * i + j];
        Hook(x, i, at < item.kv_end, token, at, head);
        bool visible = (bits >> (n % 8 * 8 + j) & 1) != 0;
        if constexpr (!HAS_MASK_BITS<Variant>) {
          visible = visible && variant.LogitsMask(p, item.request, token, at, head, item.kv_head);
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
        bits &= MaskBits(variant.custom_mask_ptr, item.qo_len, item.kv_len, token, key, min(64, item.kv_len - key));
      }
    }
    if (p.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
      const ItemBounds items(p, item.request, item.qo_len, item.kv_len, token);
      bits &= RangeBits(0, items.prefix - key) | RangeBits(items.first - key, 64);
    }
    return bits;
  }

  /// Largest score of row i of the thread.
  __device__ __forceinline__ static float Largest(const float (&s)[SCORES], int i) {
    float x = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int n = 1; n < Tr::KEYS / 8; ++n) x = fmaxf(x, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
    return x;
  }

  /// Return the smallest score that may raise the exponent of row i, as an integer. If that is negative, any score may:
  /// the order of negative numbers is not that of integers.
  __device__ __forceinline__ int Limit(int i) const {
    const float x = (m[i] + LAG) * ptx::Reciprocal(ExponentScale(i));
    return x >= 0.f ? __float_as_int(x) : INT_MIN;
  }

  /// Return false if no score of the thread's rows raises their exponents. Numbers are compared as integers: one
  /// instruction has three operands, that for floats two. Four chains of them hide their latency.
  __device__ __forceinline__ bool MayRaise(const float (&s)[SCORES]) const {
    int x[2][2];
#pragma unroll
    for (int n = 0; n < Tr::KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int a = __float_as_int(s[4 * n + 2 * i]), b = __float_as_int(s[4 * n + 2 * i + 1]);
        x[i][n % 2] = n < 2 ? max(a, b) : ptx::Max3(x[i][n % 2], a, b);
      }
    }
    return (max(x[0][0], x[0][1]) >= (HOLDS_LIMITS ? limit[0] : Limit(0))) |
           (max(x[1][0], x[1][1]) >= (HOLDS_LIMITS ? limit[1] : Limit(1)));
  }

  /// Raise m to SHIFT below the largest logit where it lags behind that by more than LAG: only then do the lanes of a row
  /// exchange their maxima, and are sums rescaled. The branches are taken by whole warps.
  template <bool MASKED>
  __device__ __forceinline__ bool Rebase(const float (&s)[SCORES]) {
    if constexpr (HAS_LIMITS && !MASKED) {
      if (!__any_sync(0xffffffffu, MayRaise(s))) return false;
    }
    float top[2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = Largest(s, i) * ExponentScale(i);
      grown = grown || top[i] > m[i] + LAG;
    }
    if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
      const float next = fmaxf(m[i], top[i] - SHIFT);
      scale[i] = next == -math::inf ? 1.f : ptx::Exp2(m[i] - next);
      m[i] = next;
      d[i] *= scale[i];
      if constexpr (HOLDS_LIMITS) limit[i] = Limit(i);
    }
    return true;
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
