// SPDX-License-Identifier: Apache-2.0
// Attention variants: how q.k becomes a weight, which pairs are visible, how the output is finished. One struct serves
// every backend. A user's struct derives from AttentionVariantBase and overrides hooks with the macros below
// (docs/attention_variants.md).
//   test  pytest tests/attention/test_variants.py
#pragma once
#include "common/math.h"
#include "common/params.h"

// A hook is a member template, so that it can be pasted into a struct without naming types. `logits` is the accumulated
// q.k; after the hook it is multiplied by sm_scale_log2 and becomes the exponent of 2.
#define REGISTER_QUERY_TRANSFORM(params, q, ...)                           \
  template <typename Params, typename T>                                   \
  __device__ __forceinline__ T QueryTransform(const Params& params, T q) { \
    __VA_ARGS__                                                            \
  }
#define REGISTER_KEY_TRANSFORM(params, k, ...)                           \
  template <typename Params, typename T>                                 \
  __device__ __forceinline__ T KeyTransform(const Params& params, T k) { \
    __VA_ARGS__                                                          \
  }
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)         \
  template <typename Params, typename T>                                                                            \
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, uint32_t qo_idx, \
                                               uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) {       \
    __VA_ARGS__                                                                                                     \
  }
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)              \
  template <typename Params>                                                                                \
  __device__ __forceinline__ bool LogitsMask(const Params& params, uint32_t batch_idx, uint32_t qo_idx,     \
                                             uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) { \
    __VA_ARGS__                                                                                             \
  }
#define REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, ...)                                        \
  template <typename Params, typename T_M>                                                                             \
  __device__ __forceinline__ void update_m_d(const Params& params, uint32_t kv_tile_idx, uint32_t qo_head_idx, T_M& m, \
                                             float& d, float& scale) {                                                 \
    __VA_ARGS__                                                                                                        \
  }
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...)                 \
  template <typename Params, typename T, typename T_M>                                                              \
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, uint32_t batch_idx, uint32_t qo_idx, \
                                               uint32_t qo_head_idx, T_M& m, float& d, float scale) {               \
    __VA_ARGS__                                                                                                     \
  }

namespace flashinfer {

/// Default hooks, which do nothing. `update_m_d` is called with kv_tile_idx == 0 exactly once per row, before any key
/// is added (m = -inf, d = 0); m is in units of base-2 exponents. `scale` rescales the accumulated output.
struct AttentionVariantBase {
  REGISTER_QUERY_TRANSFORM(params, q, { return q; })
  REGISTER_KEY_TRANSFORM(params, k, { return k; })
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return logits; })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return true; })
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {})
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    const float d_rcp =
        math::ptx_rcp(d);  // outside of the condition, so that it is computed once for the columns of a row
    return output * (m != -math::inf ? d_rcp : 0.f);
  })
};

/// Built-in variant: scaling, soft cap, ALiBi, custom mask. The kernel handles sliding windows; the flag stays in the
/// signature because published variants name it.
template <bool use_custom_mask, bool use_sliding_window, bool use_logits_soft_cap, bool use_alibi>
struct DefaultAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint8_t* custom_mask_ptr = nullptr;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  float logits_scale;  // q.k to the argument of tanh (soft cap), or to natural logits (ALiBi)
  float alibi_scale;

  template <typename Params>
  __device__ __host__ __forceinline__ DefaultAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? uint32_t(params.window_left) : kv_len;
    if constexpr (use_logits_soft_cap) {
      logits_scale = float(params.sm_scale) * math::ptx_rcp(float(params.logits_soft_cap));
      alibi_scale = math::ptx_rcp(float(params.logits_soft_cap));
      sm_scale_log2 = float(params.logits_soft_cap) * math::log2e;
    } else if constexpr (use_alibi) {
      logits_scale = float(params.sm_scale);
      alibi_scale = 1.f;
      sm_scale_log2 = math::log2e;
    } else {
      sm_scale_log2 = float(params.sm_scale) * math::log2e;
    }
    if constexpr (use_custom_mask) {
      custom_mask_ptr = params.maybe_custom_mask;
      if (custom_mask_ptr != nullptr && params.maybe_mask_indptr != nullptr)
        custom_mask_ptr += params.maybe_mask_indptr[batch_idx];
    }
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_alibi) {
      logits = logits * logits_scale +
               params.maybe_alibi_slopes[qo_head_idx] * alibi_scale * float(int32_t(kv_idx) - int32_t(qo_idx));
    } else if constexpr (use_logits_soft_cap) {
      logits = logits * logits_scale;
    }
    if constexpr (use_logits_soft_cap) logits = math::tanh(logits);
    return logits;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_custom_mask) {
      if (custom_mask_ptr == nullptr) return true;
      const int64_t bit = int64_t(qo_idx) * kv_len + kv_idx;
      return ((custom_mask_ptr[bit >> 3] >> (bit & 7)) & 1) != 0;
    }
    return true;
  })
};

namespace attention {

/// Range of keys that is visible by bounds, diagonal and sliding window.
template <typename Params>
struct MaskOf {
  int32_t qo_len, kv_len, window_left, mask_mode;

  FLASHINFER_HD MaskOf(const Params& params, int32_t qo_len, int32_t kv_len)
      : qo_len(qo_len),
        kv_len(kv_len),
        window_left(params.window_left < 0 ? INT32_MAX : params.window_left),
        mask_mode(params.mask_mode) {}

  /// First key, and one past the last key, that a query token may see.
  FLASHINFER_HD int32_t First(int32_t qo_idx) const {
    const int64_t first = int64_t(qo_idx) + kv_len - qo_len - window_left;
    return first > 0 ? int32_t(first < kv_len ? first : kv_len) : 0;
  }
  FLASHINFER_HD int32_t End(int32_t qo_idx) const {
    const bool causal = mask_mode == int32_t(MaskMode::kCausal) || mask_mode == int32_t(MaskMode::kMultiItemScoring);
    const int32_t end = causal ? qo_idx + kv_len - qo_len + 1 : kv_len;
    return end < 0 ? 0 : (end < kv_len ? end : kv_len);
  }
};

/// True if the parameters of a variant can describe multi-item scoring.
template <typename Params, typename = void>
struct HasItems {
  static constexpr bool value = false;
};
template <typename Params>
struct HasItems<Params, decltype(void(Params::maybe_token_pos_in_items_ptr))> {
  static constexpr bool value = true;
};

/// Multi-item scoring beyond its causal part: tokens of an item see the prefix and their own item only.
struct ItemBounds {
  int32_t prefix = 0, first = 0;  ///< keys below `prefix` and from `first` on are visible

  template <typename Params>
  FLASHINFER_HD ItemBounds(const Params& params, uint32_t batch_idx, int32_t qo_len, int32_t kv_len, int32_t qo_idx) {
    if constexpr (HasItems<Params>::value) {
      const int32_t position = qo_idx + kv_len - qo_len;
      prefix = int32_t(params.maybe_prefix_len_ptr[batch_idx]);
      if (position < prefix) return;
      const int64_t at = int64_t(batch_idx) * params.token_pos_in_items_len + position - prefix;
      first = position + 1 - int32_t(params.maybe_token_pos_in_items_ptr[at]);
    }
  }
};

template <typename Params>
FLASHINFER_HD bool VisibleInItem(const Params& params, uint32_t batch_idx, int32_t qo_len, int32_t kv_len,
                                 int32_t qo_idx, int32_t kv_idx) {
  const ItemBounds items(params, batch_idx, qo_len, kv_len, qo_idx);
  return kv_idx < items.prefix || kv_idx >= items.first;
}

}  // namespace attention
}  // namespace flashinfer
