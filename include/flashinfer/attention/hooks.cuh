// SPDX-License-Identifier: Apache-2.0
// What kernels do differently for hooks of a variant: whom they are called for, what they are told, and keys that they
// change.
#pragma once
#include <type_traits>

#include "../ptx/mma.cuh"
#include "query.cuh"
#include "rows.cuh"

namespace flashinfer {
namespace attention {

/// Whether hooks on logits and outputs may be called for the rows and keys that fill up a tile, with the indices of
/// others. Ours may; a user's may write down what it is given, and is called for those that exist.
template <typename Variant>
inline constexpr bool TAKES_PADDING = false;
template <bool CUSTOM_MASK, bool SLIDING_WINDOW, bool SOFT_CAP, bool ALIBI>
inline constexpr bool TAKES_PADDING<DefaultAttention<CUSTOM_MASK, SLIDING_WINDOW, SOFT_CAP, ALIBI>> = true;

/// By how many powers of two m may stay behind the largest logit, so that sums are rescaled seldom: what 16-bit weights
/// have room for above 1, or nothing where a variant says `wants_maximum`.
template <typename Variant, typename = void>
inline constexpr float LATE = 8.f;
template <typename Variant>
inline constexpr float LATE<Variant, std::enable_if_t<Variant::wants_maximum>> = 0.f;

/// Whether keys are changed between memory and the product: rotated, or by a hook of the variant.
#ifdef FLASHINFER_VARIANT_CHANGES_KEYS
inline constexpr bool HAS_KEY_HOOK = true;
#else
inline constexpr bool HAS_KEY_HOOK = false;
#endif
template <typename Params>
inline constexpr bool CHANGES_KEYS = HAS_KEY_HOOK || Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

/// B fragments of 16 keys (rows of a tile at `tile`), for the slow path in which keys are changed.
template <typename Params, typename Variant, typename KV, typename Layout>
struct KeyFragments {
  using T = typename Params::DTypeQ;
  const Params& p;
  Variant& variant;
  uint32_t tile;

  /// Column of number j of register i in k-step k.
  static __device__ __forceinline__ int Column(int k, int i, int j) {
    const int c = threadIdx.x % 4;
    return 16 * k + (IS_FP8<KV> ? 4 * c + (i % 2 == 0 ? 1 : 0) + 2 * j : 2 * c + (i % 2 == 0 ? 0 : 8) + j);
  }

  /// Registers 0, 1 for the first 8 keys, 2, 3 for the others.
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
