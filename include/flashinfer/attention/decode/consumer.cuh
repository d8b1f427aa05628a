// SPDX-License-Identifier: Apache-2.0
// Consumer of the decode kernel (kernel.cuh): scores, softmax weights and outputs of a warp, and their merge
// within a block.
#pragma once
#include "producer.cuh"

namespace flashinfer {
namespace attention {
namespace decode {

/// Query tile of an item.
template <typename Params, typename Variant, typename Tr>
struct ItemQuery {
  // Converting fp8 keys and values to fp16 costs a third of converting them to bf16. Queries of bf16 are then
  // multiplied by a power of two such that the largest number of the tile just fits; nothing is lost down to 2^-29 of
  // it.
  static constexpr bool IS_BFLOAT = std::is_same_v<typename Tr::T, __nv_bfloat16>;
  static constexpr bool IN_FP16 = Tr::FP8 && !CHANGES_KEYS<Params> && (!IS_BFLOAT || Tr::D_QK <= 256);
  static constexpr bool SCALED = IN_FP16 && IS_BFLOAT;
  using T = std::conditional_t<IN_FP16, __half, typename Tr::T>;  // type of the operands of q.k

  const Params& p;
  Variant variant;
  WorkItem item;
  float unscale = 1.f;  // inverse of the factor of the queries

  __device__ __forceinline__ ItemQuery(const Params& p, const WorkItem& item)
      : p(p), variant(p, item.request, nullptr), item(item) {}

  __device__ __forceinline__ int Rows() const {
    return min(DECODE_TILE, item.qo_len * int(p.group.divisor) - item.row_begin);
  }
  __device__ __forceinline__ int TokenOf(int row) const {
    return min(int(p.group.Divide(item.row_begin + row)), item.qo_len - 1);
  }
  __device__ __forceinline__ int HeadOf(int row) const {
    const int at = item.row_begin + row;
    return item.kv_head * int(p.group.divisor) + at - int(p.group.Divide(at)) * int(p.group.divisor);
  }

  static constexpr QueryOrder ORDER =
      IN_FP16 ? QueryOrder::kPairs : (Tr::FP8 ? QueryOrder::kOddFirst : QueryOrder::kStored);
  using Query = QueryTile<DECODE_TILE, THREADS, typename Tr::QLayout, ORDER, T, Params, Variant, typename Tr::Team>;
  __device__ __forceinline__ QueryReader<Params, Variant> Reader() { return {p, variant, item}; }

  /// Store the query; called by all threads. `exponents` has one number per warp.
  __device__ __forceinline__ void Store(const Query& query, char* q_shared, [[maybe_unused]] int* exponents) {
    float factor = 1.f;
    if constexpr (SCALED) {
      int largest = query.Exponent(Reader());
#pragma unroll
      for (int i = 16; i > 0; i /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, i));
      if (threadIdx.x % 32 == 0) exponents[Tr::Team::Warp()] = largest;
      Tr::Team::Sync();
#pragma unroll
      for (int w = 0; w < WARPS; ++w) largest = max(largest, exponents[w]);
      largest = min(max(largest, 15), 254);
      factor = __int_as_float((268 - largest) << 23);  // the largest number becomes 2^14 to 2^15
      unscale = __int_as_float((largest - 14) << 23);
    }
    query.Store(Reader(), q_shared, factor);
  }
};

/// Consumer of one warp, one item at a time. Products have 16 keys, or 16 columns of values, as M and 8 rows of the
/// query tile as N: tiles of up to 8 rows, the common case, have one of these HALVES.
template <typename Params, typename Variant, typename Tr, bool ALL_MASKED, int HALVES>
struct Consumer : ItemQuery<Params, Variant, Tr> {
  using Base = ItemQuery<Params, Variant, Tr>;
  using Base::HeadOf, Base::item, Base::p, Base::Rows, Base::TokenOf, Base::unscale, Base::variant;
  using typename Base::T;
  using Weight = std::conditional_t<Tr::FP8 && Variant::use_softmax, __half, typename Tr::T>;
  static constexpr int KEYS = Tr::KEYS, K_STEPS = Tr::D_QK / 16, N_BLOCKS = Tr::D_VO / 16;
  static constexpr int BLOCKS =
      HALVES == 1 ? KEYS / 16 : 1;          // blocks of 16 keys per step: registers hold two blocks of one half
  using Scores = float[HALVES][BLOCKS][4];  // score of key Key(i) and row Row(half, j) at 2 i + j

  // A query that would spill stays in shared memory.
  static constexpr bool Q_IN_REGISTERS = Tr::D_QK <= 192 && !(Tr::FP8 && HALVES > 1);
  uint32_t q[Q_IN_REGISTERS ? K_STEPS : 1][4];
  float o[HALVES][N_BLOCKS]
         [4];  // columns FirstColumn() and the second of each 16, rows Row(half, j), in the same order
  float m[HALVES][2], d[HALVES][2];
  int first[HALVES][2], end[HALVES][2];  // keys that each of the lane's rows may see
  int full_begin, full_end;              // keys that all rows see

  __device__ __forceinline__ explicit Consumer(const Base& query) : Base(query) {}

  // Fragment layout of a lane: two rows of each half of the query tile, two keys of 16, and two columns of 16, which
  // are adjacent for fp8 values and 8 apart otherwise.
  static __device__ __forceinline__ int Row(int half, int j) { return 8 * half + int(threadIdx.x % 4) * 2 + j; }
  static __device__ __forceinline__ int Key(int i) { return int(threadIdx.x % 32) / 4 + 8 * i; }
  static __device__ __forceinline__ int FirstColumn() { return int(threadIdx.x % 32) / 4 * (Tr::FP8 ? 2 : 1); }

  __device__ __forceinline__ void Start(char* q_shared) {
    const int lane = threadIdx.x % 32;
    if constexpr (Q_IN_REGISTERS) {
      const uint32_t tile = ptx::SharedAddress(q_shared);
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        ptx::LdMatrix(q[k], tile + Tr::QLayout::Offset(lane % 16, 2 * k + lane / 16));
      }
    }
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    full_begin = mask.First(TokenOf(DECODE_TILE - 1));
    full_end = min(mask.End(TokenOf(0)), item.kv_end);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = Row(half, j);
        first[half][j] = mask.First(TokenOf(row));
        end[half][j] = min(mask.End(TokenOf(row)), item.kv_end);
        m[half][j] = -math::inf;
        d[half][j] = 0.f;
        float scale = 1.f;
        if (item.is_first && Tr::Team::Warp() == 0) {
          variant.update_m_d(p, 0, HeadOf(row), m[half][j], d[half][j], scale);
          if (lane >= 4) d[half][j] = 0.f;  // d is summed over the lanes of a row
        }
      }
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[half][n][i] = 0.f;
      }
    }
  }

  /// Compute block `b` of the scores: the 16 keys from `token` on.
  __device__ __forceinline__ void Score(Scores& s, int b, [[maybe_unused]] int token, uint32_t k_tile,
                                        uint32_t q_tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[half][b][i] = 0.f;
    }
    auto add = [&](int k, const uint32_t (&keys)[4]) {
      uint32_t a[4];
      if constexpr (!Q_IN_REGISTERS) {
        ptx::LdMatrix(a, q_tile + Tr::QLayout::Offset(lane % 16, 2 * k + lane / 16));
      }
      const uint32_t (&x)[4] = Q_IN_REGISTERS ? q[k] : a;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) ptx::Mma<T>(s[half][b], keys, x[half], x[half + 2]);
    };
    if constexpr (CHANGES_KEYS<Params>) {
      KeyFragments<Params, Variant, typename Tr::KV, typename Tr::KLayout> keys{p, variant, k_tile};
      constexpr bool ROPE = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;
#pragma unroll
      for (int k = 0; k < (ROPE ? K_STEPS / 2 : K_STEPS); ++k) {
        uint32_t x[4], other[4];
        keys.Load(x, k);
        if constexpr (ROPE) {
          keys.Load(other, k + K_STEPS / 2);
          keys.Rotate(x, other, token, k);
          add(k + K_STEPS / 2, {other[0], other[2], other[1], other[3]});
        }
        add(k, {x[0], x[2], x[1], x[3]});
      }
    } else if constexpr (Tr::FP8) {
#pragma unroll
      for (int k = 0; k < K_STEPS; k += 2) {
        uint32_t x[4];
        const int chunk = K_STEPS % 2 == 0 ? k + lane / 16 : min(k + lane / 16, K_STEPS - 1);
        ptx::LdMatrix(x, k_tile + Tr::KLayout::Offset(lane % 16, chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (k + i >= K_STEPS) break;
          uint32_t low[2], high[2];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if constexpr (Base::IN_FP16) {
              HalvesOf<typename Tr::KV>(x[2 * i + n], low[n], high[n]);
            } else {
              ExpandFp8<T, typename Tr::KV>(x[2 * i + n], high[n], low[n]);
            }
          }
          add(k + i, {low[0], low[1], high[0], high[1]});
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        uint32_t x[4];
        ptx::LdMatrix(x, k_tile + Tr::KLayout::Offset(lane % 16, 2 * k + lane / 16));
        add(k, x);
      }
    }
  }

  /// Process the next KEYS keys, from `token` on.
  __device__ __forceinline__ void Step(int token, uint32_t k_tile, uint32_t v_tile, uint32_t q_tile) {
#pragma unroll
    for (int i = 0; i < KEYS; i += 16 * BLOCKS) {
      AddKeys(token + i, k_tile + i * Tr::KLayout::PITCH, v_tile + i * Tr::VLayout::PITCH, q_tile);
    }
  }

  __device__ __forceinline__ void AddKeys(int token, uint32_t k_tile, uint32_t v_tile, uint32_t q_tile) {
    Scores s;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      Score(s, b, token + 16 * b, k_tile + 16 * b * Tr::KLayout::PITCH, q_tile);
    }
    const bool masked = ALL_MASKED || token < full_begin || token + 16 * BLOCKS > full_end;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = s[half][b][i];
          score = Logit(score, token + 16 * b + Key(i / 2), half, i % 2, masked);
        }
      }
      if constexpr (Variant::use_softmax) Softmax(s, half);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) AddValues(s, b, v_tile + 16 * b * Tr::VLayout::PITCH);
  }

  /// Base-2 logit of `key` and row Row(half, j) from its score; the weight itself without softmax.
  __device__ __forceinline__ float Logit(float score, int key, int half, int j, bool masked) {
    const int row = Row(half, j), qo_idx = TokenOf(row), head = HeadOf(row);
    constexpr float HIDDEN = Variant::use_softmax ? -math::inf : 0.f;
    if (!HOOKS_ACCEPT_PADDING<Variant> && (row >= Rows() || key >= item.kv_end)) return HIDDEN;
    if constexpr (Base::SCALED) score *= unscale;
    const float x = variant.LogitsTransform(p, score, item.request, qo_idx, key, head, item.kv_head);
    bool visible = true;
    if (masked) {
      visible = key >= first[half][j] && key < end[half][j];
      if constexpr (ALL_MASKED) {
        visible = visible && variant.LogitsMask(p, item.request, qo_idx, key, head, item.kv_head);
        if (visible && p.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
          visible = VisibleInItem(p, item.request, item.qo_len, item.kv_len, qo_idx, key);
        }
      }
    }
    if (!visible) return HIDDEN;
    if constexpr (Variant::use_softmax) {
      return x * variant.sm_scale_log2;
    } else {
      return x;  // such a variant has no scale
    }
  }

  /// Add the values of 16 keys, weighted by block `b` of `s`.
  __device__ __forceinline__ void AddValues(const Scores& s, int b, uint32_t v_tile) {
    const int lane = threadIdx.x % 32;
    uint32_t low[HALVES], high[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      low[half] = ptx::Transposed(Pack<Weight>(s[half][b][0], s[half][b][1]));
      high[half] = ptx::Transposed(Pack<Weight>(s[half][b][2], s[half][b][3]));
    }
    auto add = [&](int n, const uint32_t (&values)[4]) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) ptx::Mma<Weight>(o[half][n], values, low[half], high[half]);
    };
    if constexpr (Tr::FP8) {
#pragma unroll
      for (int n = 0; n < N_BLOCKS; n += 2) {
        uint32_t x[4];
        const int chunk = N_BLOCKS % 2 == 0 ? n + lane / 16 : min(n + lane / 16, N_BLOCKS - 1);
        ptx::LdMatrixTrans(x, v_tile + Tr::VLayout::Offset(lane % 16, chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (n + i >= N_BLOCKS) break;
          uint32_t even[2], odd[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if constexpr (Variant::use_softmax) {
              HalvesOf<typename Tr::KV>(__byte_perm(x[2 * i + k], 0, 0x3120), even[k], odd[k]);
            } else {
              ExpandFp8<Weight, typename Tr::KV>(x[2 * i + k], even[k], odd[k]);
            }
          }
          add(n + i, {even[0], odd[0], even[1], odd[1]});
        }
      }
    } else {
      const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n) {
        uint32_t x[4];
        ptx::LdMatrixTrans(x, v_tile + Tr::VLayout::Offset(row, 2 * n + lane / 8 % 2));
        add(n, x);
      }
    }
  }

  /// Turn logits into weights relative to m. m may lag behind the maximum (MAX_LAG): testing whether it must be raised
  /// costs one vote, finding the maximum six shuffles.
  __device__ __forceinline__ void Softmax(Scores& s, int half) {
    float top[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[j] = -math::inf;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) top[j] = fmaxf(top[j], fmaxf(s[half][b][j], s[half][b][j + 2]));
    }
    if (__any_sync(0xffffffffu, top[0] > m[half][0] + MAX_LAG<Variant> || top[1] > m[half][1] + MAX_LAG<Variant>)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 4; i < 32; i *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], i));
        const float next = fmaxf(m[half][j], top[j]), base = next == -math::inf ? 0.f : next;
        const float scale = ptx::Exp2(m[half][j] - base);
        m[half][j] = next;
        d[half][j] *= scale;
#pragma unroll
        for (int n = 0; n < N_BLOCKS; ++n) {
          o[half][n][j] *= scale;
          o[half][n][j + 2] *= scale;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float base = m[half][j] == -math::inf ? 0.f : m[half][j];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = j; i < 4; i += 2) {
          s[half][b][i] = ptx::Exp2(s[half][b][i] - base);
          d[half][j] += s[half][b][i];
        }
      }
    }
  }

  /// Merge the results of the warps and write them. Called by all threads of the block; no copy targets stage
  /// `free_stage` of this warp's ring. Parts of a cluster stay in the second stage of each ring, their log-sum-exps at
  /// `scores`.
  __device__ __forceinline__ void Finish(const WorkList& work, char* rings, int free_stage, float* stats,
                                         float* scores) {
    const int lane = threadIdx.x % 32, warp = Tr::Team::Warp();
    float* m_of = stats;  // [warp][row]
    float* d_of = stats + WARPS * DECODE_TILE;
    int* buffer_of =
        reinterpret_cast<int*>(d_of + WARPS * DECODE_TILE);  // byte offset from `rings` of each warp's buffer
    const int buffer = (warp * Tr::STAGES + free_stage) * Tr::STAGE_BYTES;
    if (lane == 0) buffer_of[warp] = buffer;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float total = d[half][j];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
        if (lane < 4) {
          m_of[warp * DECODE_TILE + Row(half, j)] = m[half][j];
          d_of[warp * DECODE_TILE + Row(half, j)] = total;
        }
      }
    }
    const int rows = Rows();
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += Tr::MERGE_ROWS) {
      __syncwarp();
      Spread(ptx::SharedAddress(rings) + buffer, begin, rows);
      Tr::Team::Sync();
      Write(work, m_of, d_of, rings, buffer_of, begin, min(rows, begin + Tr::MERGE_ROWS), scores);
      Tr::Team::Sync();  // what is read here is overwritten next, by copies or other rows
    }
  }

  /// Swizzled column of the merge buffer: rows that lanes write together are in different banks, where
  static __device__ __forceinline__ int Swizzled(int row, int column) {
    return Tr::D_VO % 32 == 0 ? column ^ ((row / 2 & 3) * 8) : column;
  }

  /// Store this warp's output of rows [begin, begin + MERGE_ROWS) as floats.
  __device__ __forceinline__ void Spread(uint32_t to, int begin, int rows) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = Row(half, j) - begin;
        if (row < 0 || row >= Tr::MERGE_ROWS || Row(half, j) >= rows) continue;
        // Steps of 8 and 16 columns flip what Swizzled flips.
        const uint32_t line = to + (row * Tr::D_VO + Swizzled(row, FirstColumn())) * int(sizeof(float));
#pragma unroll
        for (int n = 0; n < N_BLOCKS; ++n) {
          const uint32_t at = Tr::D_VO % 32 == 0 ? (line ^ (n % 2 * 64)) + n / 2 * 128 : line + n * 64;
          const float x = o[half][n][j], y = o[half][n][j + 2];
          if constexpr (Tr::FP8) {
            ptx::StoreShared8(at, x, y);
          } else {
            ptx::StoreShared4(at, __float_as_uint(x));
            ptx::StoreShared4(Tr::D_VO % 32 == 0 ? at ^ 32 : at + 32, __float_as_uint(y));
          }
        }
      }
    }
  }

  /// Write rows [begin, end): the sum over warps, in their order.
  __device__ __forceinline__ void Write(const WorkList& work, const float* m_of, const float* d_of, char* rings,
                                        const int* buffer_of, int begin, int end, float* scores) {
    constexpr int VECTORS = Tr::D_VO / 4;
#pragma unroll 1
    for (int id = Tr::Team::Index(); id < (end - begin) * VECTORS; id += THREADS) {
      const int row = id / VECTORS, column = id % VECTORS * 4, at = begin + row;
      float top = -math::inf, total = 0.f, scale[WARPS], y[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, m_of[w * DECODE_TILE + at]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float x = m_of[w * DECODE_TILE + at];
        scale[w] = !Variant::use_softmax ? 1.f : (x == -math::inf ? 0.f : ptx::Exp2(x - top));
        total += d_of[w * DECODE_TILE + at] * scale[w];
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
      if (scores != nullptr) {
        char* const line = rings + at / 4 * (Tr::STAGES * Tr::STAGE_BYTES) + Tr::STAGE_BYTES + at % 4 * (Tr::D_VO * 4);
        *reinterpret_cast<float4*>(line + column * 4) = make_float4(y[0], y[1], y[2], y[3]);
        if (column == 0) scores[at] = lse;
      } else if (partial) {
        const int slot_row = item.slot * DECODE_TILE + at;
        __stcg(reinterpret_cast<float4*>(work.partial_o + int64_t(slot_row) * Tr::D_VO + column),
               make_float4(y[0], y[1], y[2], y[3]));  // a plain assignment becomes four stores
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

}  // namespace decode
}  // namespace attention
}  // namespace flashinfer
