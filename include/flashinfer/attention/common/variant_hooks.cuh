// SPDX-License-Identifier: Apache-2.0
// Adapters for variant hooks: which pairs hooks are called for, their lag, and keys that they transform.
#pragma once
#include <type_traits>

#include "../../ptx/mma.cuh"
#include "query.cuh"
#include "kv_rows.cuh"

namespace flashinfer {
namespace attention {

/// True if the hooks on logits and outputs are free of side effects and may run on the padding rows and keys of a tile.
/// User hooks may write to memory, so they only see valid pairs.
template <typename Variant>
inline constexpr bool HOOKS_ACCEPT_PADDING = false;
template <bool CUSTOM_MASK, bool SLIDING_WINDOW, bool SOFT_CAP, bool ALIBI>
inline constexpr bool HOOKS_ACCEPT_PADDING<DefaultAttention<CUSTOM_MASK, SLIDING_WINDOW, SOFT_CAP, ALIBI>> = true;

/// Maximal lag, in powers of two, of m behind the largest logit, so that sums are rescaled rarely: the headroom of
/// 16-bit weights above 1; 0 where a variant declares `wants_maximum`.
template <typename Variant, typename = void>
inline constexpr float MAX_LAG = 8.f;
template <typename Variant>
inline constexpr float MAX_LAG<Variant, std::enable_if_t<Variant::wants_maximum>> = 0.f;

/// True if keys are transformed between memory and the product: rotated, or by a hook of the variant.
#ifdef FLASHINFER_VARIANT_CHANGES_KEYS
inline constexpr bool HAS_KEY_HOOK = true;
#else
inline constexpr bool HAS_KEY_HOOK = false;
#endif
template <typename Params>
inline constexpr bool CHANGES_KEYS = HAS_KEY_HOOK || Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

/// B fragments of 16 keys (rows of the tile at `tile`), for the slow path that transforms keys.
template <typename Params, typename Variant, typename KV, typename Layout>
struct KeyFragments {
  using T = typename Params::DTypeQ;
  const Params& p;
  Variant& variant;
  uint32_t tile;

  /// Column of element j of register i in k-step k.
  static __device__ __forceinline__ int Column(int k, int i, int j) {
    const int c = threadIdx.x % 4;
    return 16 * k + (IS_FP8<KV> ? 4 * c + (i % 2 == 0 ? 1 : 0) + 2 * j : 2 * c + (i % 2 == 0 ? 0 : 8) + j);
  }

  /// Load registers 0 and 1 for the first 8 keys, 2 and 3 for the others.
  __device__ __forceinline__ void Load(uint32_t (&b)[4], int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (IS_FP8<KV>) {
      uint32_t x[4];
      ptx::LdMatrix(x, tile + Layout::Offset(lane % 16, k));
      ExpandFp8<T, KV>(x[0], b[1], b[0]);
      ExpandFp8<T, KV>(x[1], b[3], b[2]);
    } else {
      ptx::LdMatrix(b, tile + Layout::Offset(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Unpack<T>(b[i]);
      b[i] = Pack<T>(variant.KeyTransform(p, x.x), variant.KeyTransform(p, x.y));
    }
  }

  /// Rotate the first half of the columns (k-step k) with the second; the keys are at positions from `token` on.
  __device__ __forceinline__ void Rotate(uint32_t (&low)[4], uint32_t (&high)[4], int token, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float position = float(token + int(threadIdx.x % 32) / 4 + i / 2 * 8);
      const float2 x = Unpack<T>(low[i]), y = Unpack<T>(high[i]);
      float sine[2], cosine[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        QueryReader<Params, Variant>::RopeAngle(p, position, Column(k, i, j), sine[j], cosine[j]);
      }
      low[i] = Pack<T>(x.x * cosine[0] - y.x * sine[0], x.y * cosine[1] - y.y * sine[1]);
      high[i] = Pack<T>(y.x * cosine[0] + x.x * sine[0], y.y * cosine[1] + x.y * sine[1]);
    }
  }
};

}  // namespace attention
}  // namespace flashinfer
