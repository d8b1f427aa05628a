// SPDX-License-Identifier: Apache-2.0
// The computing side of the narrow kernel (narrow.cuh): scores, weights and outputs of a warp, and their merge in a block.
#pragma once
#include "narrow_producer.cuh"

namespace flashinfer {
namespace attention {
namespace narrow {

/// The computing side of a warp: one item at a time.
template <typename Params, typename Variant, typename Tr, bool ALL_MASKED>
struct Consumer {
  static constexpr int KEYS = Tr::KEYS, K_STEPS = Tr::D_QK / 16, N_BLOCKS = Tr::D_VO / 16;
  using Scores = float[KEYS / 8][4];
  // fp8 keys and values become fp16 at a third of the cost of bf16. Queries of bf16 are multiplied by a power of two
  // then, such that the largest number of the tile just fits and nothing is lost down to 2^-29 of it.
  static constexpr bool IS_BFLOAT = std::is_same_v<typename Tr::T, __nv_bfloat16>;
  static constexpr bool IN_HALVES = Tr::FP8 && !CHANGES_KEYS<Params> && (!IS_BFLOAT || Tr::D_QK <= 256);
  static constexpr bool SCALED = IN_HALVES && IS_BFLOAT;
  using T = std::conditional_t<IN_HALVES, __half, typename Tr::T>;                             // of products with keys
  using Weight = std::conditional_t<Tr::FP8 && Variant::use_softmax, __half, typename Tr::T>;  // with values

  const Params& p;
  Variant variant;
  WorkItem item;
  uint32_t q[Tr::Q_IN_REGISTERS ? K_STEPS : 1][4];
  float o[2 * N_BLOCKS][4];
  float m[2], d[2];
  int first[2], end[2];      // keys that each of the lane's rows may see
  int full_begin, full_end;  // keys that all rows see
  float unscale = 1.f;       // undoes what queries were multiplied by

  __device__ __forceinline__ Consumer(const Params& p, const WorkItem& item)
      : p(p), variant(p, item.request, nullptr), item(item) {}

  __device__ __forceinline__ int Row(int i) const { return int(threadIdx.x % 32) / 4 + 8 * i; }
  __device__ __forceinline__ int Rows() const {
    return min(NARROW_TILE, item.qo_len * int(p.group.divisor) - item.row_begin);
  }
  __device__ __forceinline__ int TokenOf(int row) const {
    return min(int(p.group.Divide(item.row_begin + row)), item.qo_len - 1);
  }
  __device__ __forceinline__ int HeadOf(int row) const {
    const int at = item.row_begin + row;
    return item.kv_head * int(p.group.divisor) + at - int(p.group.Divide(at)) * int(p.group.divisor);
  }

  static constexpr QueryOrder ORDER =
      IN_HALVES ? QueryOrder::kPairs : (Tr::FP8 ? QueryOrder::kOddFirst : QueryOrder::kStored);
  using Query = QueryTile<NARROW_TILE, THREADS, typename Tr::QLayout, ORDER, T, Params, Variant>;
  __device__ __forceinline__ QueryReader<Params, Variant> Reader() { return {p, variant, item}; }

  /// By all threads. `exponents` has one number for each warp.
  __device__ __forceinline__ void StoreQuery(const Query& query, char* q_shared, [[maybe_unused]] int* exponents) {
    float factor = 1.f;
    if constexpr (SCALED) {
      int largest = query.Exponent(Reader());
#pragma unroll
      for (int i = 16; i > 0; i /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, i));
      if (threadIdx.x % 32 == 0) exponents[threadIdx.x / 32] = largest;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < WARPS; ++w) largest = max(largest, exponents[w]);
      largest = min(max(largest, 15), 254);
      factor = __int_as_float((268 - largest) << 23);  // the largest number becomes 2^14 to 2^15
      unscale = __int_as_float((largest - 14) << 23);
    }
    query.Store(Reader(), q_shared, factor);
  }

  __device__ __forceinline__ void Start(char* q_shared) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    if constexpr (Tr::Q_IN_REGISTERS) {
      const uint32_t tile = ptx::SharedAddress(q_shared);
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        ptx::LdMatrix(q[k], tile + Tr::QLayout::Offset(lane % 16, 2 * k + lane / 16));
      }
    }
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    full_begin = mask.First(TokenOf(NARROW_TILE - 1));
    full_end = min(mask.End(TokenOf(0)), item.kv_end);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = mask.First(TokenOf(Row(i)));
      end[i] = min(mask.End(TokenOf(Row(i))), item.kv_end);
      m[i] = -math::inf;
      d[i] = 0.f;
      float scale = 1.f;
      if (item.is_first && threadIdx.x < 32) {
        variant.update_m_d(p, 0, HeadOf(Row(i)), m[i], d[i], scale);
        if (c != 0) d[i] = 0.f;  // d is summed over the lanes of a row
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * N_BLOCKS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.f;
    }
  }

  /// Scores of the 16 keys from `token` on, in s[first] and the next.
  __device__ __forceinline__ void Score(Scores& s, int first, [[maybe_unused]] int token, uint32_t k_tile,
                                        uint32_t q_tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = first; n < first + 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.f;
    }
    auto query = [&](int k, uint32_t (&a)[4]) {
      if constexpr (Tr::Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q[k][i];
      } else {
        ptx::LdMatrix(a, q_tile + Tr::QLayout::Offset(lane % 16, 2 * k + lane / 16));
      }
    };
    if constexpr (CHANGES_KEYS<Params>) {
      KeyFragments<Params, Variant, typename Tr::KV, typename Tr::KLayout> keys{p, variant, k_tile};
      constexpr bool ROPE = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;
#pragma unroll
      for (int k = 0; k < (ROPE ? K_STEPS / 2 : K_STEPS); ++k) {
        uint32_t a[4], b[4], b_other[4];
        keys.Load(b, k);
        if constexpr (ROPE) {
          keys.Load(b_other, k + K_STEPS / 2);
          keys.Rotate(b, b_other, token, k);
          query(k + K_STEPS / 2, a);
          ptx::Mma<T>(s[first], a, b_other[0], b_other[1]);
          ptx::Mma<T>(s[first + 1], a, b_other[2], b_other[3]);
        }
        query(k, a);
        ptx::Mma<T>(s[first], a, b[0], b[1]);
        ptx::Mma<T>(s[first + 1], a, b[2], b[3]);
      }
    } else if constexpr (Tr::FP8) {
      const int row = lane % 16;
#pragma unroll
      for (int k = 0; k < K_STEPS; k += 2) {
        uint32_t b[4];
        const int chunk = K_STEPS % 2 == 0 ? k + lane / 16 : min(k + lane / 16, K_STEPS - 1);
        ptx::LdMatrix(b, k_tile + Tr::KLayout::Offset(row, chunk));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (k + half >= K_STEPS) break;
          uint32_t a[4];
          query(k + half, a);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            uint32_t low, high;
            if constexpr (IN_HALVES) {
              HalvesOf<typename Tr::KV>(b[2 * half + n], low, high);
            } else {
              ExpandFp8<T, typename Tr::KV>(b[2 * half + n], high, low);
            }
            ptx::Mma<T>(s[first + n], a, low, high);
          }
        }
      }
    } else {
      const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        uint32_t a[4], b[4];
        ptx::LdMatrix(b, k_tile + Tr::KLayout::Offset(row, 2 * k + lane / 8 % 2));
        query(k, a);
        ptx::Mma<T>(s[first], a, b[0], b[1]);
        ptx::Mma<T>(s[first + 1], a, b[2], b[3]);
      }
    }
  }

  /// The next keys, from `token` on.
  __device__ __forceinline__ void Step(int token, uint32_t k_tile, uint32_t v_tile, uint32_t q_tile) {
    const int c = threadIdx.x % 4;
    Scores s;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) Score(s, n, token + 8 * n, k_tile + 8 * n * Tr::KLayout::PITCH, q_tile);
    const bool masked = ALL_MASKED || token < full_begin || token + KEYS > full_end;
    [[maybe_unused]] const int rows = Rows();
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Row(i / 2), key = token + 8 * n + 2 * c + i % 2;
        const int qo_idx = TokenOf(row), head = HeadOf(row);
        if (!TAKES_PADDING<Variant> && (row >= rows || key >= item.kv_end)) {
          s[n][i] = Variant::use_softmax ? -math::inf : 0.f;
          continue;
        }
        if constexpr (SCALED) s[n][i] *= unscale;
        float x = variant.LogitsTransform(p, s[n][i], item.request, qo_idx, key, head, item.kv_head);
        bool visible = true;
        if (masked) {
          visible = key >= first[i / 2] && key < end[i / 2];
          if constexpr (ALL_MASKED) {
            visible = visible && variant.LogitsMask(p, item.request, qo_idx, key, head, item.kv_head);
            if (visible && p.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
              visible = VisibleInItem(p, item.request, item.qo_len, item.kv_len, qo_idx, key);
            }
          }
        }
        if constexpr (Variant::use_softmax) {
          s[n][i] = visible ? x * variant.sm_scale_log2 : -math::inf;
        } else {
          s[n][i] = visible ? x : 0.f;
        }
      }
    }
    if constexpr (Variant::use_softmax) Softmax(s);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) AddValues(s[n], s[n + 1], v_tile + 8 * n * Tr::VLayout::PITCH);
  }

  /// Values of 16 keys: 8 of weights `x` and 8 of `y`.
  __device__ __forceinline__ void AddValues(const float (&x)[4], const float (&y)[4], uint32_t v_tile) {
    const int lane = threadIdx.x % 32;
    uint32_t a[4] = {Pack<Weight>(x[0], x[1]), Pack<Weight>(x[2], x[3]), Pack<Weight>(y[0], y[1]),
                     Pack<Weight>(y[2], y[3])};
    if constexpr (Tr::FP8) {
      const int row = lane % 16;
#pragma unroll
      for (int n = 0; n < N_BLOCKS; n += 2) {
        uint32_t b[4];
        const int chunk = N_BLOCKS % 2 == 0 ? n + lane / 16 : min(n + lane / 16, N_BLOCKS - 1);
        ptx::LdMatrixTrans(b, v_tile + Tr::VLayout::Offset(row, chunk));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (n + half >= N_BLOCKS) break;
          uint32_t even[2], odd[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (Variant::use_softmax) {
              HalvesOf<typename Tr::KV>(__byte_perm(b[2 * half + i], 0, 0x3120), even[i], odd[i]);
            } else {
              ExpandFp8<Weight, typename Tr::KV>(b[2 * half + i], even[i], odd[i]);
            }
          }
          ptx::Mma<Weight>(o[2 * (n + half)], a, even[0], even[1]);
          ptx::Mma<Weight>(o[2 * (n + half) + 1], a, odd[0], odd[1]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n) {
        uint32_t b[4];
        ptx::LdMatrixTrans(b, v_tile + Tr::VLayout::Offset(lane % 16, 2 * n + lane / 16));
        ptx::Mma<Weight>(o[2 * n], a, b[0], b[1]);
        ptx::Mma<Weight>(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void Softmax(Scores& s) {
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
#pragma unroll
      for (int n = 1; n < KEYS / 8; ++n) x = fmaxf(x, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      const float next = fmaxf(m[i], x), base = next == -math::inf ? 0.f : next;
      scale[i] = ptx::Exp2(m[i] - base);
      m[i] = next;
      d[i] *= scale[i];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          s[n][j] = ptx::Exp2(s[n][j] - base);
          d[i] += s[n][j];
        }
      }
    }
    if (__any_sync(0xffffffffu, scale[0] != 1.f || scale[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < 2 * N_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= scale[i / 2];
      }
    }
  }

  /// Merge the warps' results and write them. All threads of the block call it; stage `free_stage` of this warp's ring
  /// is one that no copy targets.
  __device__ __forceinline__ void Finish(const WorkList& work, char* rings, int free_stage, float* stats) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
    float* m_of = stats;  // [warp][row]
    float* d_of = stats + WARPS * NARROW_TILE;
    int* buffer_of = reinterpret_cast<int*>(d_of + WARPS * NARROW_TILE);  // bytes from `rings`, for each warp
    const int buffer = (warp * Tr::STAGES + free_stage) * Tr::STAGE_BYTES;
    if (lane == 0) buffer_of[warp] = buffer;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      d[i] = GroupSum(d[i], 4);
      if (c == 0) {
        m_of[warp * NARROW_TILE + Row(i)] = m[i];
        d_of[warp * NARROW_TILE + Row(i)] = d[i];
      }
    }
    const int rows = Rows();
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += Tr::MERGE_ROWS) {
      __syncwarp();
      Spread(ptx::SharedAddress(rings) + buffer, begin, rows);
      __syncthreads();
      Write(work, m_of, d_of, rings, buffer_of, begin, min(rows, begin + Tr::MERGE_ROWS));
      __syncthreads();  // what is read here is overwritten next, by copies or other rows
    }
  }

  /// Where column `column` of row `row` is in the merge buffer: rows start in different banks, where they can be
  /// permuted within themselves.
  static __device__ __forceinline__ int Swizzled(int row, int column) {
    return Tr::D_VO % 32 == 0 ? column ^ ((row & 3) * 8) : column;
  }

  /// This warp's output of rows [begin, begin + MERGE_ROWS) as floats.
  __device__ __forceinline__ void Spread(uint32_t to, int begin, int rows) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = Row(i) - begin;
      if (row < 0 || row >= Tr::MERGE_ROWS || Row(i) >= rows) continue;
      // The lane's columns of 16: 4c .. 4c + 3 (fp8), or 2c, 2c + 1, 2c + 8, 2c + 9 (see Step). Steps of 8 and 16 columns
      // flip what Swizzled flips.
      const uint32_t line = to + (row * Tr::D_VO + Swizzled(row, Tr::FP8 ? 4 * c : 2 * c)) * int(sizeof(float));
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = Tr::FP8 ? o[2 * n + j % 2][2 * i + j / 2] : o[2 * n + j / 2][2 * i + j % 2];
        if constexpr (Tr::D_VO % 32 == 0) {
          const uint32_t at = line ^ (n % 2 * 64);
          ptx::StoreShared8(at + n / 2 * 128, x[0], x[1]);
          ptx::StoreShared8((Tr::FP8 ? at + 8 : at ^ 32) + n / 2 * 128, x[2], x[3]);
        } else {
          ptx::StoreShared8(line + n * 64, x[0], x[1]);
          ptx::StoreShared8(line + n * 64 + (Tr::FP8 ? 8 : 32), x[2], x[3]);
        }
      }
    }
  }

  /// Rows [begin, end): the sum over warps, in their order.
  __device__ __forceinline__ void Write(const WorkList& work, const float* m_of, const float* d_of, const char* rings,
                                        const int* buffer_of, int begin, int end) {
    constexpr int VECTORS = Tr::D_VO / 4;
#pragma unroll 1
    for (int id = threadIdx.x; id < (end - begin) * VECTORS; id += THREADS) {
      const int row = id / VECTORS, column = id % VECTORS * 4, at = begin + row;
      float top = -math::inf, total = 0.f, scale[WARPS], y[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, m_of[w * NARROW_TILE + at]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float x = m_of[w * NARROW_TILE + at];
        scale[w] = !Variant::use_softmax ? 1.f : (x == -math::inf ? 0.f : ptx::Exp2(x - top));
        total += d_of[w * NARROW_TILE + at] * scale[w];
        const float4 part = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(rings + buffer_of[w]) +
                                                             row * Tr::D_VO + Swizzled(row, column));
        y[0] += part.x * scale[w];
        y[1] += part.y * scale[w];
        y[2] += part.z * scale[w];
        y[3] += part.w * scale[w];
      }
      if constexpr (!Variant::use_softmax) top = 0.f, total = 1.f;
      const int token = p.group.Divide(item.row_begin + at), head = HeadOf(at);
      const float lse = total > 0.f ? top + __log2f(total) : -math::inf;
      const bool partial = item.slot >= 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = variant.OutputTransform(p, y[j], item.request, token, head, top, total, 1.f);
      if (partial) {
        const int slot_row = item.slot * NARROW_TILE + at;
        __stcg(reinterpret_cast<float4*>(work.partial_o + int64_t(slot_row) * Tr::D_VO + column),
               make_float4(y[0], y[1], y[2], y[3]));  // an assignment becomes four stores
        if (column == 0) work.partial_lse[slot_row] = lse;
      } else {
        const int64_t n = int64_t(item.qo_begin) + token;
        RoundTo<typename Params::DTypeO, 4>(
            {y[0] * p.out_scale, y[1] * p.out_scale, y[2] * p.out_scale, y[3] * p.out_scale})
            .Store(p.o + n * p.o_stride_n + head * p.o_stride_h + column);
        if (column == 0 && p.lse != nullptr) p.lse[n * p.num_qo_heads + head] = lse * p.lse_scale;
      }
    }
  }
};

}  // namespace narrow
}  // namespace attention
}  // namespace flashinfer
