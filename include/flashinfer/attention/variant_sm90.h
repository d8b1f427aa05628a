// SPDX-License-Identifier: Apache-2.0
// Variants in the published form for SM90 (docs/attention_variants.md): the names that such a struct uses, and an adapter
// that gives it the form of variants.h, for every backend. Its parameters are params.additional_params, its constructor
// has the place of a tile, and GetAttentionUpdater() says whether there is a softmax, and its scale.
//   test  pytest tests/attention/test_variants_sm90.py
#pragma once
#include <type_traits>
#include <utility>

#include "variants.h"

namespace flashinfer {

/// Result of GetAttentionUpdater() of a variant with softmax: logits times `sm_scale_log2` are exponents of 2, or
/// logits are (WITH_SCALE = false).
template <int NUM_ROWS_PER_THREAD, bool WITH_SCALE = true>
struct OnlineSoftmax {
  static constexpr bool IS_SOFTMAX = true;
  float factor;

  FLASHINFER_HD explicit OnlineSoftmax(float sm_scale_log2 = 1.f) : factor(WITH_SCALE ? sm_scale_log2 : 1.f) {}
};

/// Result of GetAttentionUpdater() of a variant without softmax: transformed logits are the weights.
template <int NUM_ROWS_PER_THREAD>
struct DefaultUpdater {
  static constexpr bool IS_SOFTMAX = false;
};

namespace attention {

template <typename T, typename = void>
inline constexpr bool IS_UPDATER = false;
template <typename T>
inline constexpr bool IS_UPDATER<T, std::void_t<decltype(T::IS_SOFTMAX)>> = true;

template <typename T, typename = void>
inline constexpr bool HAS_SCALE_PV = false;
template <typename T>
inline constexpr bool HAS_SCALE_PV<T, std::void_t<decltype(T::scale_pv)>> = true;

template <typename T, typename = void>
inline constexpr bool HAS_SCALES_OF_VALUES = false;
template <typename T>
inline constexpr bool HAS_SCALES_OF_VALUES<T, std::void_t<decltype(T::maybe_scale_v)>> = true;

template <typename T, typename = void>
inline constexpr bool HAS_SCALE_OF_VALUES = false;
template <typename T>
inline constexpr bool HAS_SCALE_OF_VALUES<T, std::void_t<decltype(T::scale_v_scalar)>> = true;

/// Place of a query token: its tile of 128 tokens, its heads, the first row and the first key (or entry of the page
/// table) of its request, and the lengths and the number of the request.
struct BlockCoord {
  int32_t q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx;
};

/// The first argument of constructors and hooks.
template <typename Params>
struct MainloopParams {
  const Params& additional_params;
  int32_t window_left;
};

}  // namespace attention

/// Return the scale of the values of a KV head: that of the tensor `maybe_scale_v`, or the number `scale_v_scalar`, or 1.
template <typename Params>
FLASHINFER_HD float get_v_scale(const Params& params, [[maybe_unused]] int kv_head_idx) {
  if constexpr (attention::HAS_SCALES_OF_VALUES<Params>) {
    if (params.maybe_scale_v != nullptr) return params.maybe_scale_v[kv_head_idx];
  }
  if constexpr (attention::HAS_SCALE_OF_VALUES<Params>) return float(params.scale_v_scalar);
  return 1.f;
}

namespace attention {

/// A variant that calls those of type `User`. A tile has rows of several heads here, so that a `User` is constructed for
/// each row: a constructor of few instructions costs nothing, since compilers find what does not change.
template <typename User>
struct Sm90Variant : AttentionVariantBase {
#if defined(__CUDACC__) && !defined(__CUDA_ARCH__)
  // nvcc removes bodies of device functions from host code, and with them the type behind `auto`. Launches do not ask.
  static constexpr bool use_softmax = true;
#else
  using Updater = decltype(std::declval<User&>().template GetAttentionUpdater<2>());
  static_assert(
      IS_UPDATER<Updater>,
      "GetAttentionUpdater() must return OnlineSoftmax or DefaultUpdater: there is no CuTe for other updaters");
  static constexpr bool use_softmax = Updater::IS_SOFTMAX;
#endif
  static constexpr float sm_scale_log2 = 1.f;  // heads may have different scales: the hook multiplies

  template <typename Params>
  __device__ __host__ __forceinline__ Sm90Variant(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {}

  template <typename Params>
  static __device__ __forceinline__ MainloopParams<Params> Seen(const Params& params) {
    return {params, params.window_left};
  }

  template <typename Params>
  static __device__ __forceinline__ User Made(const Params& params, uint32_t batch_idx, uint32_t qo_idx,
                                              uint32_t qo_head_idx, uint32_t kv_head_idx) {
    constexpr uint32_t TILE = 128;
    const BlockCoord place{int32_t(qo_idx / TILE),
                           int32_t(qo_head_idx),
                           int32_t(kv_head_idx),
                           params.qo_indptr != nullptr ? int32_t(params.qo_indptr[batch_idx]) : 0,
                           params.kv_indptr != nullptr ? int32_t(params.kv_indptr[batch_idx]) : 0,
                           int32_t(params.get_qo_len(batch_idx)),
                           int32_t(params.get_kv_len(batch_idx)),
                           int32_t(batch_idx)};
    return User(Seen(params), place);
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    User user = Made(params, batch_idx, qo_idx, qo_head_idx, kv_head_idx);
    T x = user.LogitsTransform(Seen(params), logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx);
    if constexpr (use_softmax) x *= user.template GetAttentionUpdater<2>().factor;
    return x;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    User user = Made(params, batch_idx, qo_idx, qo_head_idx, kv_head_idx);
    return user.LogitsMask(Seen(params), batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx);
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    if constexpr (use_softmax) {
      output = AttentionVariantBase::OutputTransform(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale);
    }
    if constexpr (HAS_SCALE_PV<User>) {
      output *= Made(params, batch_idx, qo_idx, qo_head_idx, params.group.Divide(qo_head_idx)).scale_pv;
    }
    return output;
  })
};

}  // namespace attention
}  // namespace flashinfer
