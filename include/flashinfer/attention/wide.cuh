// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows: prefill, and heads too large for narrow.cuh. Bound by tensor cores, and by shared memory
// which feeds them.
//
// A block takes a tile of rows; each warp has MT * 16 of them and all keys, so that softmax needs no exchange between
// warps. Where a warp's registers cannot hold the output of its rows, WD warps share them: each computes the weights of a
// part of the keys, which they exchange, and the output in a part of the value columns. Two buffers of keys and values:
// one is filled while the other is used, with one barrier per step. With MT = 2 a key fragment is used for two products
// per load, without which reading shared memory (128 B a clock) would take longer than the products. Fragments are loaded
// a step ahead of their products.
//   test  pytest tests/attention      bench  python benchmarks/bench_prefill.py
#pragma once
#include "../ptx/barrier.cuh"
#include "mask_bits.cuh"
#include "tile.cuh"
#include "wide_loader.cuh"

namespace flashinfer {
namespace attention {
namespace wide {

template <typename Params_, int TILE_>
struct Traits {
  using Params = Params_;
  using T = typename Params::DTypeQ;
  using KV = SharedKV<Params>;
  static constexpr int TILE = TILE_;
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr bool FP8 = IS_FP8<KV>;
  static constexpr int WD = TILE == NARROW_TILE ? 4 : (D_VO <= 256 ? 1 : 2);
  static constexpr int MT = TILE == WIDEST_TILE && D_VO <= 128 ? 2 : 1;
  static constexpr int WM = TILE / (16 * MT);
  static constexpr int WARPS = WM * WD, THREADS = WARPS * 32;
  static constexpr int D_WARP = (D_VO / 16 + WD - 1) / WD * 16;  // value columns of a warp
  using KLayout = RowLayout<D_QK* int(sizeof(KV))>;
  using VLayout = std::conditional_t<Params::SHARED_KV, KLayout, RowLayout<D_VO* int(sizeof(KV))>>;
  using QLayout = RowLayout<D_QK* int(sizeof(T))>;
  using OLayout = RowLayout<D_VO* int(sizeof(T))>;
  static constexpr int Q_BYTES = TILE * (QLayout::PITCH > OLayout::PITCH ? QLayout::PITCH : OLayout::PITCH);
  static constexpr int ROW_BYTES = KLayout::PITCH + (Params::SHARED_KV ? 0 : VLayout::PITCH);
  static constexpr int CLASS_BYTES = MaskClasses::BYTES;
  // What warps that share rows exchange: weights of up to 64 keys, a number per row.
  static constexpr int WEIGHT_BYTES = WD > 1 ? WM * MT * 4 * 512 : 0, TOP_BYTES = WD > 1 ? WARPS * MT * 16 * 4 : 0;
  static constexpr int FIXED = Q_BYTES + WEIGHT_BYTES + TOP_BYTES + CLASS_BYTES + 128 * int(sizeof(RowOffsets<Params>));
  // Keys of a step: what lets two blocks of 4 warps share an SM if those are at least 32, else what one block can have.
  static constexpr int BUDGET =
      (THREADS == 128 && TILE != NARROW_TILE ? SharedLimit() / 2 - 1024 : SharedLimit()) - FIXED;
  static constexpr int ROOM = BUDGET >= 64 * ROW_BYTES ? BUDGET : SharedLimit() - FIXED;
  static constexpr int Keys(int fit) { return fit >= 64 ? 64 : (fit >= 32 ? 32 : (fit >= 16 ? 16 : 0)); }
  // Where more keys fit once than twice, keys are copied while values are used and the other way round.
  static constexpr bool ALTERNATES = !Params::SHARED_KV && Keys(ROOM / ROW_BYTES) > Keys(ROOM / (2 * ROW_BYTES));
  static constexpr int STAGES = ALTERNATES ? 1 : 2, KEYS = Keys(ROOM / (STAGES * ROW_BYTES));
  static_assert(KEYS > 0, "heads this large do not fit into shared memory");
  // Warps that share rows compute the scores of a part of the keys each, unless those are too few.
  static constexpr bool SHARES = WD > 1 && KEYS % (16 * WD) == 0;
  static constexpr int KEYS_WARP = SHARES ? KEYS / WD : KEYS;
  static_assert(THREADS >= KEYS, "a thread follows each row of a step");
  static constexpr int K_BYTES = KEYS * KLayout::PITCH, V_BYTES = Params::SHARED_KV ? 0 : KEYS * VLayout::PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int OFFSET_BYTES = 2 * KEYS * int(sizeof(RowOffsets<Params>));  // of the rows of the next two steps
  static constexpr int SHARED_BYTES =
      Q_BYTES + STAGES * STAGE_BYTES + OFFSET_BYTES + CLASS_BYTES + WEIGHT_BYTES + TOP_BYTES;
  static_assert(SHARED_BYTES <= SharedLimit(), "it was made to fit");
  static constexpr bool QUERY_STAYS = MT == 2 && D_QK <= 64 && !FP8 && !CHANGES_KEYS<Params>;  // in registers
  static constexpr int BLOCKS_PER_SM = THREADS == 128 && SHARED_BYTES <= SharedLimit() / 2 - 1024 ? 2 : 1;
};

/// ExpandFp8, by the instruction that SM89 has from e4m3 to fp16.
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

template <typename Tr, typename Variant, bool ALL_MASKED>
struct Consumer {
  using Params = typename Tr::Params;
  using T = typename Tr::T;
  // fp8 values become fp16, exactly and in few instructions. Softmax's weights fit into fp16 too (Rebase).
  using Weight = std::conditional_t<Tr::FP8 && Variant::use_softmax, __half, T>;
  static constexpr int MT = Tr::MT, K_STEPS = Tr::D_QK / 16, N_BLOCKS = Tr::D_WARP / 16,
                       KEY_BLOCKS = Tr::KEYS_WARP / 16;

  const Params& p;
  Variant variant;
  const WorkItem& item;
  int row0, column0;  // of the warp in the tile
  int key0;           // of its scores in a step
  uint32_t weights;   // what the warps of its rows exchange, in shared memory
  float* tops;
  float o[MT][2 * N_BLOCKS][4];
  uint32_t q[Tr::QUERY_STAYS ? K_STEPS : 1][MT][4];
  float m[MT][2], d[MT][2];
  int full_begin, full_end;  // keys that all rows see

  __device__ __forceinline__ Consumer(const Params& p, const WorkItem& item, [[maybe_unused]] char* exchange)
      : p(p), variant(p, item.request, nullptr), item(item) {
    const int warp = threadIdx.x / 32, group = warp % Tr::WM, rank = warp / Tr::WM;
    row0 = group * (16 * MT);
    column0 = rank * Tr::D_WARP;
    key0 = 0;
    if constexpr (Tr::SHARES) {
      key0 = rank * Tr::KEYS_WARP;
      weights = ptx::SharedAddress(exchange) + group * (Tr::KEYS / 16 * MT * 512) + threadIdx.x % 32 * 16;
      tops = reinterpret_cast<float*>(exchange + Tr::WEIGHT_BYTES) + group * (Tr::WD * 16 * MT);
    }
  }

  __device__ __forceinline__ int Row(int t, int i) const { return row0 + 16 * t + int(threadIdx.x % 32) / 4 + 8 * i; }
  __device__ __forceinline__ int Rows() const {
    return min(Tr::TILE, item.qo_len * int(p.group.divisor) - item.row_begin);
  }
  __device__ __forceinline__ int TokenOf(int row) const {
    return min(int(p.group.Divide(item.row_begin + row)), item.qo_len - 1);
  }
  __device__ __forceinline__ int HeadOf(int row) const {
    const int at = item.row_begin + row;
    return item.kv_head * int(p.group.divisor) + at - int(p.group.Divide(at)) * int(p.group.divisor);
  }

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

  __device__ __forceinline__ void Start() {
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    full_begin = mask.First(TokenOf(Tr::TILE - 1));
    full_end = min(mask.End(TokenOf(0)), item.kv_end);
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m[t][i] = -math::inf;
        d[t][i] = 0.f;
        float scale = 1.f;
        if (item.is_first) variant.update_m_d(p, 0, HeadOf(Row(t, i)), m[t][i], d[t][i], scale);
        if (threadIdx.x % 4 != 0 || key0 != 0) d[t][i] = 0.f;  // it is summed over the lanes of a row
      }
#pragma unroll
      for (int n = 0; n < 2 * N_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[t][n][i] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void LoadA(uint32_t (&a)[MT][4], uint32_t q_lane, int k) const {
#pragma unroll
    for (int t = 0; t < MT; ++t) ptx::LdMatrix(a[t], Tr::QLayout::Pair(q_lane, k) + 16 * t * Tr::QLayout::PITCH);
  }

  __device__ __forceinline__ void KeepQuery(uint32_t q_tile) {
    const uint32_t q_lane = q_tile + Tr::QLayout::Offset(row0 + int(threadIdx.x % 16), int(threadIdx.x % 32) / 16);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) LoadA(q[k], q_lane, k);
  }

  __device__ __forceinline__ void Scores(float (&s)[MT][2 * KEY_BLOCKS][4], [[maybe_unused]] int token, uint32_t q_tile,
                                         uint32_t k_tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t q_lane = q_tile + Tr::QLayout::Offset(row0 + lane % 16, lane / 16);
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int n = 0; n < 2 * KEY_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] = 0.f;
      }
    }
    auto multiply = [&](int n, const uint32_t (&a)[MT][4], uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
#pragma unroll
      for (int t = 0; t < MT; ++t) {
        ptx::Mma<T>(s[t][2 * n], a[t], b0, b1);
        ptx::Mma<T>(s[t][2 * n + 1], a[t], b2, b3);
      }
    };
    if constexpr (CHANGES_KEYS<Params>) {
      constexpr bool ROPE = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;
      for (int k = 0; k < (ROPE ? K_STEPS / 2 : K_STEPS); ++k) {
        uint32_t a[MT][4], a_other[MT][4];
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
        uint32_t a[2][MT][4];
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
      uint32_t a[2][MT][4], b[2][4];
      auto load = [&](int i) {
        const uint32_t rows = i % KEY_BLOCKS * 16 * Tr::KLayout::PITCH;
        ptx::LdMatrix(b[i % 2], Tr::KLayout::Pair(k_lane, i / KEY_BLOCKS) + rows);
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

  /// Hooks on the logits, and -inf (0 without softmax) where a pair is not visible.
  template <bool MASKED>
  __device__ __forceinline__ void Transform(float (&s)[MT][2 * KEY_BLOCKS][4], int token) {
    const int c = threadIdx.x % 4;
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    [[maybe_unused]] const int rows = Rows();
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Row(t, i), qo_idx = TokenOf(row), head = HeadOf(row);
        if (!TAKES_PADDING<Variant> && row >= rows) continue;  // nobody reads what becomes of it
        const int first = MASKED ? mask.First(qo_idx) : 0, end = MASKED ? min(mask.End(qo_idx), item.kv_end) : 0;
        [[maybe_unused]] uint64_t bits = MASKED ? RangeBits(first - token, end - token) : 0;
        if constexpr (MASKED && ALL_MASKED && HAS_MASK_BITS<Variant>) {
          if (variant.custom_mask_ptr != nullptr) {
            bits &=
                MaskBits(variant.custom_mask_ptr, item.kv_len, qo_idx, token, min(Tr::KEYS_WARP, item.kv_len - token));
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
            if (TAKES_PADDING<Variant> || !MASKED || key < item.kv_end) {
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

  /// Weights of a row are 2^(logit - m). `m` may stay behind the largest logit by what 16-bit weights have room for
  /// above 1, so that sums are rescaled seldom, and only then do the lanes of a row exchange their maxima.
  __device__ __forceinline__ void Rebase(const float (&s)[MT][2 * KEY_BLOCKS][4]) {
    constexpr float ROOM = 8.f;
    const float log2_scale = variant.sm_scale_log2;
    float top[MT][2];
    bool grown = false;
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = fmaxf(s[t][0][2 * i], s[t][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < 2 * KEY_BLOCKS; ++n) x = fmaxf(x, fmaxf(s[t][n][2 * i], s[t][n][2 * i + 1]));
        top[t][i] = x * log2_scale;
        grown = grown || top[t][i] > m[t][i] + ROOM;
      }
    }
    if constexpr (Tr::SHARES) {
      if (!ptx::BarrierAny(1 + row0 / (16 * MT), 32 * Tr::WD, grown)) return;
    } else {
      if (!__any_sync(0xffffffffu, grown)) return;
    }
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[t][i] = fmaxf(top[t][i], __shfl_xor_sync(0xffffffffu, top[t][i], 1));
        top[t][i] = fmaxf(top[t][i], __shfl_xor_sync(0xffffffffu, top[t][i], 2));
      }
    }
    Exchange(top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int t = 0; t < MT; ++t) {
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

  /// Combine a number per row, the same in the lanes of a row, with those of the other warps of these rows.
  template <typename F>
  __device__ __forceinline__ void Exchange([[maybe_unused]] float (&x)[MT][2], const F& combine) {
    if constexpr (Tr::SHARES) {
#pragma unroll
      for (int t = 0; t < MT; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (threadIdx.x % 4 == 0) tops[key0 / Tr::KEYS_WARP * (16 * MT) + Row(t, i) - row0] = x[t][i];
        }
      }
      ptx::BarrierSync(1 + row0 / (16 * MT), 32 * Tr::WD);
#pragma unroll
      for (int t = 0; t < MT; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[t][i] = tops[Row(t, i) - row0];
#pragma unroll
          for (int rank = 1; rank < Tr::WD; ++rank) {
            x[t][i] = combine(x[t][i], tops[rank * (16 * MT) + Row(t, i) - row0]);
          }
        }
      }
    }
  }

  /// Weights of 16 keys as fragments of A, and their sum.
  __device__ __forceinline__ void Weights(uint32_t (&a)[MT][4], float (&s)[MT][2 * KEY_BLOCKS][4], int k) {
#pragma unroll
    for (int t = 0; t < MT; ++t) {
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

  __device__ __forceinline__ void Values(float (&s)[MT][2 * KEY_BLOCKS][4], uint32_t v_tile) {
    const int lane = threadIdx.x % 32;
    // Column blocks of the other warps come before ours; whole lines of them are in the address.
    constexpr int LINE = Tr::FP8 ? 128 : 64;
    const int start = Tr::WD == 1 || Tr::D_WARP % LINE == 0 ? 0 : column0 % LINE / 16;
    const uint32_t v_lane = v_tile + Tr::VLayout::Offset(lane % 16, lane / 16) + column0 / LINE * 128;
    constexpr int COLUMNS = Tr::FP8 ? 2 : 1, TURNS = (N_BLOCKS + COLUMNS - 1) / COLUMNS, BLOCKS = Tr::KEYS / 16,
                  STEPS = BLOCKS * TURNS;
    uint32_t a[MT][4], b[2][4];
    auto load = [&](int i) {
      const uint32_t row = 16 * (i / TURNS) * Tr::VLayout::PITCH;
      if constexpr (Tr::FP8) {
        const int n = i % TURNS * 2;
        if constexpr (Tr::VLayout::SWIZZLED && Tr::D_WARP % 32 == 0) {
          ptx::LdMatrixTrans(b[i % 2], Tr::VLayout::Pair(v_lane, start / 2 + n / 2) + row);
        } else {
          const int block = column0 / 16 + (N_BLOCKS % 2 == 0 ? n + lane / 16 : min(n + lane / 16, N_BLOCKS - 1));
          ptx::LdMatrixTrans(b[i % 2], v_tile + row + Tr::VLayout::Offset(lane % 16, block));
        }
      } else {
        ptx::LdMatrixTrans(b[i % 2], Tr::VLayout::Pair(v_lane, start + i % TURNS) + row);
      }
    };
    load(0);
    if constexpr (Tr::SHARES) {
#pragma unroll
      for (int k = 0; k < KEY_BLOCKS; ++k) {
        Weights(a, s, k);
#pragma unroll
        for (int t = 0; t < MT; ++t) {
          ptx::StoreShared16(weights + ((key0 / 16 + k) * MT + t) * 512, uint4{a[t][0], a[t][1], a[t][2], a[t][3]});
        }
      }
      ptx::BarrierSync(1 + row0 / (16 * MT), 32 * Tr::WD);
    }
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      if constexpr (Tr::SHARES) {
#pragma unroll
        for (int t = 0; t < MT; ++t) ptx::LoadFragment(a[t], weights + (k * MT + t) * 512);
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
            for (int t = 0; t < MT; ++t) {
              ptx::Mma<Weight>(o[t][2 * (n + half)], a[t], even[0], even[1]);
              ptx::Mma<Weight>(o[t][2 * (n + half) + 1], a[t], odd[0], odd[1]);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < MT; ++t) {
            ptx::Mma<T>(o[t][2 * n], a[t], x[0], x[1]);
            ptx::Mma<T>(o[t][2 * n + 1], a[t], x[2], x[3]);
          }
        }
      }
    }
  }

  /// Normalise and write. Results go through shared memory (where the query was) to be stored 16 bytes at a time.
  __device__ __forceinline__ void Finish(const WorkList& work, char* shared_o) {
    const int c = threadIdx.x % 4, lane = threadIdx.x % 32, rows = Rows();
    const bool partial = item.slot >= 0;
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) d[t][i] = GroupSum(d[t][i], 4);
    }
    Exchange(d, [](float a, float b) { return a + b; });
    Meet();
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Row(t, i), qo_idx = TokenOf(row), head = HeadOf(row);
        float total = d[t][i], top = m[t][i];
        if constexpr (!Variant::use_softmax) top = 0.f, total = 1.f;
        const float lse = total > 0.f ? top + __log2f(total) : -math::inf;
        const int64_t slot_row = int64_t(item.slot) * Tr::TILE + row;
        if (c == 0 && column0 == 0 && row < rows) {
          if (partial) {
            work.partial_lse[slot_row] = lse;
          } else if (p.lse != nullptr) {
            p.lse[(int64_t(item.qo_begin) + qo_idx) * p.num_qo_heads + head] = lse * p.lse_scale;
          }
        }
        if (row >= rows && (partial || !TAKES_PADDING<Variant>)) continue;
        // f(n, x) for blocks of 16 columns, of which the lane has 4: 4c .. 4c + 3 (fp8), or 2c, 2c + 1, 2c + 8, 2c + 9.
        auto each = [&](const auto& f) {
#pragma unroll
          for (int n = 0; n < N_BLOCKS; ++n) {
            if (Tr::D_VO % Tr::D_WARP != 0 && column0 + 16 * n >= Tr::D_VO) continue;
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float y = Tr::FP8 ? o[t][2 * n + j % 2][2 * i + j / 2] : o[t][2 * n + j / 2][2 * i + j % 2];
              x[j] = variant.OutputTransform(p, y, item.request, qo_idx, head, top, total, 1.f);
            }
            f(n, x);
          }
        };
        constexpr int FIRST = Tr::FP8 ? 4 : 2, SECOND = Tr::FP8 ? 2 : 8;
        if (partial) {
          float* to = work.partial_o + slot_row * Tr::D_VO + column0 + FIRST * c;
          each([&](int n, const float (&x)[4]) {
            *reinterpret_cast<float2*>(to + 16 * n) = make_float2(x[0], x[1]);
            *reinterpret_cast<float2*>(to + 16 * n + SECOND) = make_float2(x[2], x[3]);
          });
        } else {
          // Address of the first pair of numbers in block 0; the second is in the next chunk, or behind it (fp8).
          const int chunk = Tr::FP8 ? c / 2 : 0, byte = Tr::FP8 ? c % 2 * 8 : c * 4;
          const uint32_t low = ptx::SharedAddress(shared_o) + Tr::OLayout::Offset(row, chunk) + byte;
          const uint32_t high = Tr::FP8 ? low + 4 : ptx::SharedAddress(shared_o) + Tr::OLayout::Offset(row, 1) + byte;
          each([&](int n, const float (&x)[4]) {
            using To = typename Params::DTypeO;
            const int block = Tr::WD == 1 ? n : column0 / 16 + n;
            ptx::StoreShared4(Tr::OLayout::Pair(low, block), Pack<To>(x[0] * p.out_scale, x[1] * p.out_scale));
            ptx::StoreShared4(Tr::OLayout::Pair(high, block), Pack<To>(x[2] * p.out_scale, x[3] * p.out_scale));
          });
        }
      }
    }
    if (partial) return;
    Meet();
    const int first = OWN_ROWS ? row0 + lane / 8 : int(threadIdx.x) / 8, end = OWN_ROWS ? row0 + 16 * MT : Tr::TILE;
#pragma unroll 2
    for (int row = first; row < min(end, rows); row += OWN_ROWS ? 4 : Tr::THREADS / 8) {
      typename Params::DTypeO* to = p.o +
                                    (int64_t(item.qo_begin) + p.group.Divide(item.row_begin + row)) * p.o_stride_n +
                                    HeadOf(row) * p.o_stride_h;
#pragma unroll
      for (int chunk = lane % 8; chunk < Tr::D_VO / 8; chunk += 8) {
        const uint4 x = *reinterpret_cast<const uint4*>(shared_o + Tr::OLayout::Offset(row, chunk));
        *reinterpret_cast<uint4*>(to + 8 * chunk) = x;
      }
    }
  }

 private:
  /// Whether results of a warp replace the queries of that warp alone.
  static constexpr bool OWN_ROWS = Tr::WD == 1 && Tr::QLayout::PITCH == Tr::OLayout::PITCH;

  /// Wait for the warps whose rows of shared memory this one shares.
  __device__ __forceinline__ void Meet() const {
    if constexpr (OWN_ROWS) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

/// The items of block `block` of a list, in SHARED_BYTES at `shared`.
template <typename Params, typename Variant, int TILE, bool PAGED, bool ALL_MASKED>
__device__ __forceinline__ void WideBlock(const Params& p, const WorkList& work, const RowStrides<Params>& strides,
                                          char* shared, int block) {
  using Tr = Traits<Params, TILE>;
  char* const stages = shared + Tr::Q_BYTES;
  auto* const offsets = reinterpret_cast<RowOffsets<Params>*>(stages + Tr::STAGES * Tr::STAGE_BYTES);
  uint8_t* const classes = reinterpret_cast<uint8_t*>(offsets + 2 * Tr::KEYS);
  const uint32_t q_tile = ptx::SharedAddress(shared), ring = ptx::SharedAddress(stages);
  constexpr bool SEVERAL = TILE == NARROW_TILE;  // larger tiles are in lists of an item per block (plan.h)
  for (WorkItem item = FirstItem<TILE>(p, work, block); item.request >= 0;) {
    Loader<Tr, PAGED> loader(p, strides, item, offsets);
    Consumer<Tr, Variant, ALL_MASKED> consumer(p, item, reinterpret_cast<char*>(classes + Tr::CLASS_BYTES));
    // Where a step starts, skipping those of which a custom mask hides everything.
    MaskClasses mask_classes(classes, item.kv_start, Tr::KEYS);
    if constexpr (ALL_MASKED && HAS_MASK_BITS<Variant>) {
      mask_classes.Classify(consumer.variant.custom_mask_ptr, item, consumer.TokenOf(0), consumer.TokenOf(TILE - 1));
    }
    auto next_step = [&](int token) {
      if constexpr (ALL_MASKED && HAS_MASK_BITS<Variant>) {
        while (token < item.kv_end && mask_classes.IsEmpty(token)) token += Tr::KEYS;
      }
      return token;
    };
    // A turn computes step `token` while `following` is copied and the page table for the one after it is read.
    int token = next_step(item.kv_start), following = next_step(token + Tr::KEYS), buffer = 0;
    loader.AskPage(token);
    consumer.LoadQuery(shared);
    loader.StoreOffset(token, 0);
    loader.AskPage(following);
    if constexpr (Loader<Tr, PAGED>::HAS_TABLE) __syncthreads();
    if constexpr (Tr::ALTERNATES) {
      loader.template Issue<true, false>(token, 0, ring);
    } else {
      loader.template Issue<true, true>(token, 0, ring);
    }
    consumer.Start();
    loader.StoreOffset(following, 1);
    if (Tr::QUERY_STAYS || token >= item.kv_end) {  // without a turn, nobody waits for the query, which results replace
      ptx::CopyWait<0>();
      __syncthreads();
      if constexpr (Tr::QUERY_STAYS) consumer.KeepQuery(q_tile);
    }
#pragma unroll 1
    while (token < item.kv_end) {
      const int after = next_step(following + Tr::KEYS);
      loader.AskPage(after);
      ptx::CopyWait<0>();
      __syncthreads();  // keys and values have landed; the other buffer and its offsets are free
      if constexpr (Tr::ALTERNATES) {
        loader.template Issue<false, true>(token, buffer, ring);
      } else if (following < item.kv_end) {
        loader.template Issue<true, true>(following, buffer ^ 1, ring + (buffer ^ 1) * Tr::STAGE_BYTES);
      }
      bool masked = token < consumer.full_begin || token + Tr::KEYS > consumer.full_end;
      if constexpr (ALL_MASKED) {
        if constexpr (HAS_MASK_BITS<Variant>) {
          masked = masked || !mask_classes.IsFull(token) || p.mask_mode == int32_t(MaskMode::kMultiItemScoring);
        } else {
          masked = true;
        }
      }
      const uint32_t k_tile = ring + (Tr::ALTERNATES ? 0 : buffer) * Tr::STAGE_BYTES;
      const uint32_t v_tile = Params::SHARED_KV ? k_tile : k_tile + Tr::K_BYTES;
      float s[Tr::MT][Tr::KEYS_WARP / 8][4];
      const int key0 = token + consumer.key0;
      consumer.Scores(s, key0, q_tile, k_tile + consumer.key0 * Tr::KLayout::PITCH);
      if constexpr (Tr::ALTERNATES) {
        ptx::CopyWait<0>();
        __syncthreads();  // values have landed; keys have been used
        if (following < item.kv_end) loader.template Issue<true, false>(following, buffer ^ 1, ring);
      }
      if (masked) {
        consumer.template Transform<true>(s, key0);
      } else {
        consumer.template Transform<false>(s, key0);
      }
      if constexpr (Variant::use_softmax) consumer.Rebase(s);
      consumer.Values(s, v_tile);
      loader.StoreOffset(after, buffer);  // its step was issued before the barrier above
      token = following;
      following = after;
      buffer ^= 1;
    }
    consumer.Finish(work, shared);
    if (!SEVERAL || item.next < 0) break;
    item = ListItem(p, work, item.next);
    __syncthreads();  // the next item overwrites what is read here
  }
}

template <typename Params, typename Variant, int TILE, bool PAGED, bool ALL_MASKED>
__global__ void __launch_bounds__(Traits<Params, TILE>::THREADS, Traits<Params, TILE>::BLOCKS_PER_SM)
    WideKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work,
               const __grid_constant__ RowStrides<Params> strides) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  WideBlock<Params, Variant, TILE, PAGED, ALL_MASKED>(p, work, strides, shared, blockIdx.x);
  ptx::LaunchDependents();
}

}  // namespace wide

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
int ResidentWide() {
  using Tr = wide::Traits<Params, TILE>;
  return ResidentBlocksOf<wide::WideKernel<Params, Variant<ALL_MASKED>, TILE, PAGED, ALL_MASKED>, Tr::THREADS,
                          Tr::SHARED_BYTES>();
}

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchWide(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.blocks == 0) return cudaSuccess;
  if (!RowsAligned(params)) return cudaErrorMisalignedAddress;
  using Tr = wide::Traits<Params, TILE>;
  return LaunchBlocks<wide::WideKernel<Params, Variant<ALL_MASKED>, TILE, PAGED, ALL_MASKED>, Tr::THREADS,
                      Tr::SHARED_BYTES>(work.blocks, enable_pdl, stream, params, work, RowStrides<Params>(params));
}

}  // namespace attention
}  // namespace flashinfer
