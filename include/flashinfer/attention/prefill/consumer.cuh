// SPDX-License-Identifier: Apache-2.0
// Consumer of the prefill kernel (kernel.cuh): scores, softmax weights and output of the rows of a warp.
#pragma once
#include "loader.cuh"
#include "row_state.cuh"

namespace flashinfer {
namespace attention {
namespace prefill {

/// ExpandFp8 with the conversion instruction that SM89 and later have from e4m3 to fp16.
template <typename To, typename KV>
__device__ __forceinline__ void ExpandValues(uint32_t x, uint32_t& even, uint32_t& odd) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<To, __half> && std::is_same_v<KV, __nv_fp8_e4m3>) {
    const uint32_t pairs = __byte_perm(x, 0, 0x3120);
    even = ptx::HalvesOfE4M3(uint16_t(pairs));
    odd = ptx::HalvesOfE4M3(uint16_t(pairs >> 16));
    return;
  }
#endif
  ExpandFp8<To, KV>(x, even, odd);
}

/// Computation of one warp on the keys and values of a step.
template <typename Tr, typename Variant, bool ALL_MASKED>
struct Consumer : RowState<Tr, Variant> {
  using Base = RowState<Tr, Variant>;
  using Params = typename Tr::Params;
  using T = typename Tr::T;
  // fp8 values convert to fp16 exactly and in few instructions. Softmax weights fit into fp16 too (Rebase).
  using Weight = std::conditional_t<Tr::FP8 && Variant::use_softmax, __half, T>;
  static constexpr int M_TILES = Tr::M_TILES, K_STEPS = Tr::D_QK / 16, N_BLOCKS = Tr::WARP_COLUMNS / 16,
                       KEY_BLOCKS = Tr::KEYS_WARP / 16;
  using Base::p, Base::variant, Base::item, Base::row0, Base::column0, Base::key0, Base::weights, Base::o, Base::m,
      Base::d;
  using Base::Row, Base::Rows, Base::TokenOf, Base::HeadOf, Base::Exchange;

  uint32_t q[Tr::QUERY_STAYS ? K_STEPS : 1][M_TILES][4];

  using Base::Base;

  __device__ __forceinline__ void LoadQuery(char* q_shared) {
    if constexpr (QUERY_AS_STORED<Tr, Variant>) {
      CopyQuery<Tr>(p, item, ptx::SharedAddress(q_shared));
    } else {
      const QueryReader<Params, Variant> reader{p, variant, item};
      constexpr QueryOrder ORDER = Tr::FP8 ? QueryOrder::kOddFirst : QueryOrder::kStored;
      QueryTile<Tr::TILE, Tr::THREADS, typename Tr::QLayout, ORDER, T, Params, Variant> query;
      query.Load(reader);
      query.Store(reader, q_shared);
    }
  }

  __device__ __forceinline__ void LoadA(uint32_t (&a)[M_TILES][4], uint32_t q_lane, int k) const {
#pragma unroll
    for (int t = 0; t < M_TILES; ++t)
      ptx::LdMatrix(a[t], Tr::QLayout::FusedLists(q_lane, k) + 16 * t * Tr::QLayout::PITCH);
  }

  __device__ __forceinline__ void KeepQuery(uint32_t q_tile) {
    const uint32_t q_lane = q_tile + Tr::QLayout::Offset(row0 + int(threadIdx.x % 16), int(threadIdx.x % 32) / 16);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) LoadA(q[k], q_lane, k);
  }

  __device__ __forceinline__ void Scores(float (&s)[M_TILES][2 * KEY_BLOCKS][4], [[maybe_unused]] int token,
                                         uint32_t q_tile, uint32_t k_tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t q_lane = q_tile + Tr::QLayout::Offset(row0 + lane % 16, lane / 16);
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] = 0.f;
      }
    }
    auto multiply = [&](int n, const uint32_t (&a)[M_TILES][4], uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
        ptx::Mma<T>(s[t][2 * n], a[t], b0, b1);
        ptx::Mma<T>(s[t][2 * n + 1], a[t], b2, b3);
      }
    };
    if constexpr (CHANGES_KEYS<Params>) {
      constexpr bool ROPE = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;
      for (int k = 0; k < (ROPE ? K_STEPS / 2 : K_STEPS); ++k) {
        uint32_t a[M_TILES][4], a_other[M_TILES][4];
        LoadA(a, q_lane, k);
        if constexpr (ROPE) LoadA(a_other, q_lane, k + K_STEPS / 2);
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
          KeyFragments<Params, Variant, typename Tr::KV, typename Tr::KLayout> keys{
              p, variant, k_tile + n * 16 * Tr::KLayout::PITCH};
          uint32_t b[4], b_other[4];
          keys.Load(b, k);
          if constexpr (ROPE) {
            keys.Load(b_other, k + K_STEPS / 2);
            keys.Rotate(b, b_other, token + 16 * n, k);
            multiply(n, a_other, b_other[0], b_other[1], b_other[2], b_other[3]);
          }
          multiply(n, a, b[0], b[1], b[2], b[3]);
        }
      }
    } else if constexpr (Tr::FP8) {
#pragma unroll
      for (int k = 0; k < K_STEPS; k += 2) {
        uint32_t a[2][M_TILES][4];
        LoadA(a[0], q_lane, k);
        if (k + 1 < K_STEPS) LoadA(a[1], q_lane, k + 1);
        const int chunk = K_STEPS % 2 == 0 ? k + lane / 16 : min(k + lane / 16, K_STEPS - 1);
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
          uint32_t b[4];
          ptx::LdMatrix(b, k_tile + Tr::KLayout::Offset(16 * n + lane % 16, chunk));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (k + half >= K_STEPS) break;
            uint32_t even[2], odd[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) ExpandFp8<T, typename Tr::KV>(b[2 * half + i], even[i], odd[i]);
            multiply(n, a[half], odd[0], even[0], odd[1], even[1]);
          }
        }
      }
    } else {
      constexpr int STEPS = K_STEPS * KEY_BLOCKS;
      const uint32_t k_lane = k_tile + Tr::KLayout::Offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      uint32_t a[2][M_TILES][4], b[2][4];
      auto load = [&](int i) {
        const uint32_t rows = i % KEY_BLOCKS * 16 * Tr::KLayout::PITCH;
        ptx::LdMatrix(b[i % 2], Tr::KLayout::FusedLists(k_lane, i / KEY_BLOCKS) + rows);
      };
      if constexpr (!Tr::QUERY_STAYS) LoadA(a[0], q_lane, 0);
      load(0);
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        if (!Tr::QUERY_STAYS && k + 1 < K_STEPS) LoadA(a[(k + 1) % 2], q_lane, k + 1);
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
          const int i = k * KEY_BLOCKS + n;
          if (i + 1 < STEPS) load(i + 1);
          const uint32_t (&x)[4] = b[i % 2];
          multiply(n, Tr::QUERY_STAYS ? q[k] : a[k % 2], x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  /// Apply the hooks to the logits; set invisible pairs to -inf (0 without softmax).
  template <bool MASKED>
  __device__ __forceinline__ void Transform(float (&s)[M_TILES][2 * KEY_BLOCKS][4], int token) {
    const int c = threadIdx.x % 4;
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    [[maybe_unused]] const int rows = Rows();
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Row(t, i), qo_idx = TokenOf(row), head = HeadOf(row);
        if (!HOOKS_ACCEPT_PADDING<Variant> && row >= rows) continue;  // padding rows are never read
        const int first = MASKED ? mask.First(qo_idx) : 0, end = MASKED ? min(mask.End(qo_idx), item.kv_end) : 0;
        [[maybe_unused]] uint64_t bits = MASKED ? RangeBits(first - token, end - token) : 0;
        if constexpr (MASKED && ALL_MASKED && HAS_MASK_BITS<Variant>) {
          if (variant.custom_mask_ptr != nullptr) {
            bits &= MaskBits(variant.custom_mask_ptr, item.qo_len, item.kv_len, qo_idx, token,
                             min(Tr::KEYS_WARP, item.kv_len - token));
          }
        }
        if constexpr (MASKED && ALL_MASKED) {
          if (p.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
            const ItemBounds items(p, item.request, item.qo_len, item.kv_len, qo_idx);
            bits &= RangeBits(0, items.prefix - token) | RangeBits(items.first - token, 64);
          }
        }
        bits >>= 2 * c;
#pragma unroll
        for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int key = token + 8 * n + 2 * c + j;
            float& x = s[t][n][2 * i + j];
            if (HOOKS_ACCEPT_PADDING<Variant> || !MASKED || key < item.kv_end) {
              x = variant.LogitsTransform(p, x, item.request, qo_idx, key, head, item.kv_head);
            }
            if constexpr (MASKED) {
              bool visible = (bits >> (8 * n + j) & 1) != 0;
              if constexpr (!(ALL_MASKED && HAS_MASK_BITS<Variant>)) {
                visible = visible && variant.LogitsMask(p, item.request, qo_idx, key, head, item.kv_head);
              }
              if (!visible) x = Variant::use_softmax ? -math::inf : 0.f;
            }
          }
        }
      }
    }
  }

  /// Update m. Weights of a row are 2^(logit - m). `m` may lag behind the largest logit (MAX_LAG): the lanes of a row
  /// exchange their maxima only when m is raised.
  __device__ __forceinline__ void Rebase(const float (&s)[M_TILES][2 * KEY_BLOCKS][4]) {
    const float log2_scale = variant.sm_scale_log2;
    float top[M_TILES][2];
    bool grown = false;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = fmaxf(s[t][0][2 * i], s[t][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < 2 * KEY_BLOCKS; ++n) x = fmaxf(x, fmaxf(s[t][n][2 * i], s[t][n][2 * i + 1]));
        top[t][i] = x * log2_scale;
        grown = grown || top[t][i] > m[t][i] + MAX_LAG<Variant>;
      }
    }
    if constexpr (Tr::SPLITS_KEYS) {
      if (!ptx::BarrierAny(1 + row0 / (16 * M_TILES), 32 * Tr::COLUMN_WARPS, grown)) return;
    } else {
      if (!__any_sync(0xffffffffu, grown)) return;
    }
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[t][i] = fmaxf(top[t][i], __shfl_xor_sync(0xffffffffu, top[t][i], 1));
        top[t][i] = fmaxf(top[t][i], __shfl_xor_sync(0xffffffffu, top[t][i], 2));
      }
    }
    Exchange(top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float next = fmaxf(m[t][i], top[t][i]);
        scale[i] = next == -math::inf ? 1.f : ptx::Exp2(m[t][i] - next);
        m[t][i] = next;
        d[t][i] *= scale[i];
      }
#pragma unroll
      for (int n = 0; n < 2 * N_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[t][n][i] *= scale[i / 2];
      }
    }
  }

  /// Compute the weights of 16 keys as A fragments, and their sum.
  __device__ __forceinline__ void Weights(uint32_t (&a)[M_TILES][4], float (&s)[M_TILES][2 * KEY_BLOCKS][4], int k) {
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float (&x)[4] = s[t][2 * k + i / 2];
        if constexpr (Variant::use_softmax) {
          const float base = m[t][i % 2] == -math::inf ? 0.f : m[t][i % 2];
#pragma unroll
          for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) {
            x[j] = ptx::Exp2(fmaf(x[j], variant.sm_scale_log2, -base));
            d[t][i % 2] += x[j];
          }
        }
        a[t][i] = Pack<Weight>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void Values(float (&s)[M_TILES][2 * KEY_BLOCKS][4], uint32_t v_tile) {
    const int lane = threadIdx.x % 32;
    // Column blocks of the other warps come before this warp's; whole 128-byte lines of them are added to the address.
    constexpr int LINE = Tr::FP8 ? 128 : 64;
    const int start = Tr::COLUMN_WARPS == 1 || Tr::WARP_COLUMNS % LINE == 0 ? 0 : column0 % LINE / 16;
    const uint32_t v_lane = v_tile + Tr::VLayout::Offset(lane % 16, lane / 16) + column0 / LINE * 128;
    constexpr int COLUMNS = Tr::FP8 ? 2 : 1, TURNS = (N_BLOCKS + COLUMNS - 1) / COLUMNS, BLOCKS = Tr::KEYS / 16,
                  STEPS = BLOCKS * TURNS;
    uint32_t a[M_TILES][4], b[2][4];
    auto load = [&](int i) {
      const uint32_t row = 16 * (i / TURNS) * Tr::VLayout::PITCH;
      if constexpr (Tr::FP8) {
        const int n = i % TURNS * 2;
        if constexpr (Tr::VLayout::SWIZZLED && Tr::WARP_COLUMNS % 32 == 0) {
          ptx::LdMatrixTrans(b[i % 2], Tr::VLayout::FusedLists(v_lane, start / 2 + n / 2) + row);
        } else {
          const int block = column0 / 16 + (N_BLOCKS % 2 == 0 ? n + lane / 16 : min(n + lane / 16, N_BLOCKS - 1));
          ptx::LdMatrixTrans(b[i % 2], v_tile + row + Tr::VLayout::Offset(lane % 16, block));
        }
      } else {
        ptx::LdMatrixTrans(b[i % 2], Tr::VLayout::FusedLists(v_lane, start + i % TURNS) + row);
      }
    };
    load(0);
    if constexpr (Tr::SPLITS_KEYS) {
#pragma unroll
      for (int k = 0; k < KEY_BLOCKS; ++k) {
        Weights(a, s, k);
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
          ptx::StoreShared16(weights + ((key0 / 16 + k) * M_TILES + t) * 512,
                             uint4{a[t][0], a[t][1], a[t][2], a[t][3]});
        }
      }
      ptx::BarrierSync(1 + row0 / (16 * M_TILES), 32 * Tr::COLUMN_WARPS);
    }
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      if constexpr (Tr::SPLITS_KEYS) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) ptx::LoadFragment(a[t], weights + (k * M_TILES + t) * 512);
      } else {
        Weights(a, s, k);
      }
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int i = k * TURNS + turn, n = turn * COLUMNS;
        if (i + 1 < STEPS) load(i + 1);
        const uint32_t (&x)[4] = b[i % 2];
        if constexpr (Tr::FP8) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (n + half >= N_BLOCKS) break;
            uint32_t even[2], odd[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) ExpandValues<Weight, typename Tr::KV>(x[2 * half + j], even[j], odd[j]);
#pragma unroll
            for (int t = 0; t < M_TILES; ++t) {
              ptx::Mma<Weight>(o[t][2 * (n + half)], a[t], even[0], even[1]);
              ptx::Mma<Weight>(o[t][2 * (n + half) + 1], a[t], odd[0], odd[1]);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < M_TILES; ++t) {
            ptx::Mma<T>(o[t][2 * n], a[t], x[0], x[1]);
            ptx::Mma<T>(o[t][2 * n + 1], a[t], x[2], x[3]);
          }
        }
      }
    }
  }
};

}  // namespace prefill
}  // namespace attention
}  // namespace flashinfer
