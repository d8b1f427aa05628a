// SPDX-License-Identifier: Apache-2.0
// Loads of the query tile from global to shared memory.
#pragma once
#include "../../vec_dtypes.cuh"
#include "convert.cuh"
#include "../variants.h"

namespace flashinfer {
namespace attention {

/// Reader of query elements as the kernel multiplies them: transformed, rotated, 0 outside of the tile.
template <typename Params, typename Variant>
struct QueryReader {
  const Params& p;
  Variant& variant;
  const WorkItem& item;

  __device__ __forceinline__ float Stored(int row, int d) const {
    const int token = p.group.Divide(row), head = item.kv_head * int(p.group.divisor) + row - token * p.group.divisor;
    const int64_t n = int64_t(item.qo_begin) + token;
    if constexpr (Params::SHARED_KV) {
      if (d >= Params::HEAD_DIM_VO) {
        return ToFloat(p.q_pe[n * p.q_pe_stride_n + head * p.q_pe_stride_h + d - Params::HEAD_DIM_VO]);
      }
    }
    return ToFloat(p.q[n * p.q_stride_n + head * p.q_stride_h + d]);
  }

  __device__ __forceinline__ float operator()(int row, int d) const {
    row += item.row_begin;
    if (row >= item.qo_len * int(p.group.divisor)) return 0.f;
    float x = variant.QueryTransform(p, Stored(row, d));
    if constexpr (Params::POS_ENCODING == PosEncodingMode::kRoPELlama) {
      constexpr int HALF = Params::HEAD_DIM_QK / 2;
      const float other = variant.QueryTransform(p, Stored(row, d < HALF ? d + HALF : d - HALF));
      const float position = float(int(p.group.Divide(row)) + item.kv_len - item.qo_len);
      float sine, cosine;
      RopeAngle(p, position, d < HALF ? d : d - HALF, sine, cosine);
      x = d < HALF ? x * cosine - other * sine : x * cosine + other * sine;
    }
    return x;
  }

  /// Load columns [d, d + 8) of a row as stored. Returns raw bits: unpacking them would wait for the load.
  using Vector8 = Vec<typename Params::DTypeQ, 8>;
  __device__ __forceinline__ typename Vector8::Bits Vector(int row, int d) const {
    const int at = item.row_begin + row;
    if (at >= item.qo_len * int(p.group.divisor)) return {};
    const int token = p.group.Divide(at), head = item.kv_head * int(p.group.divisor) + at - token * p.group.divisor;
    return *reinterpret_cast<const typename Vector8::Bits*>(p.q + (int64_t(item.qo_begin) + token) * p.q_stride_n +
                                                            head * p.q_stride_h + d);
  }

  /// Read the same columns as the kernel multiplies them.
  __device__ __forceinline__ void Read(float (&x)[8], int row, int d) const {
    if constexpr (Params::POS_ENCODING == PosEncodingMode::kRoPELlama || Params::SHARED_KV) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) x[i] = (*this)(row, d + i);
    } else {
      const auto bits = Vector(row, d);
      const auto& v = reinterpret_cast<const Vector8&>(bits);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = variant.QueryTransform(p, ToFloat(v[i]));
    }
  }

  static __device__ __forceinline__ void RopeAngle(const Params& p, float position, int pair, float& sine,
                                                   float& cosine) {
    const float frequency =
        float(p.rope_rcp_scale) * exp2f(log2f(float(p.rope_rcp_theta)) * (2.f * pair / Params::HEAD_DIM_QK));
    sincosf(position * frequency, &sine, &cosine);
  }
};

/// Column order of a query tile: the order in which keys arrive. Of each 16 columns, fp8 keys arrive odd ones first
/// (ExpandFp8), or the first two of each four (HalvesOf).
enum class QueryOrder { kStored, kOddFirst, kPairs };

/// The threads of a block, as those that handle a query tile.
struct WholeBlock {
  static __device__ __forceinline__ uint32_t Index() { return threadIdx.x; }
};

/// Query tile on its way to shared memory, handled by all threads of a block: loaded first, stored as numbers of type T
/// once it has arrived.
template <int TILE, int THREADS, typename Layout, QueryOrder ORDER, typename T, typename Params, typename Variant,
          typename Team = WholeBlock>
struct QueryTile {
  static constexpr int CHUNKS = Params::HEAD_DIM_QK / 8, TURNS = (TILE * CHUNKS + THREADS - 1) / THREADS;
  // Rows that are put together or rotated are read when they are stored; so are tiles that need many registers.
  static constexpr bool AHEAD = Params::POS_ENCODING != PosEncodingMode::kRoPELlama && !Params::SHARED_KV && TURNS <= 4;
  using Vector8 = Vec<typename Params::DTypeQ, 8>;
  typename Vector8::Bits loaded[AHEAD ? TURNS : 1];

  __device__ __forceinline__ float Loaded(int turn, int i) const {
    return ToFloat(reinterpret_cast<const Vector8&>(loaded[turn])[i]);
  }

  __device__ __forceinline__ void Load(const QueryReader<Params, Variant>& query) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int id = turn * THREADS + int(Team::Index());
        if (TILE * CHUNKS % THREADS == 0 || id < TILE * CHUNKS)
          loaded[turn] = query.Vector(id / CHUNKS, id % CHUNKS * 8);
      }
    }
  }

  /// The largest exponent of this thread's numbers, with the bias of a float.
  __device__ __forceinline__ int Exponent(const QueryReader<Params, Variant>& query) const {
    static_assert(AHEAD, "nothing was loaded");
    float largest = 0.f;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      if (TILE * CHUNKS % THREADS != 0 && turn * THREADS + int(Team::Index()) >= TILE * CHUNKS) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        largest = fmaxf(largest, fabsf(query.variant.QueryTransform(query.p, Loaded(turn, i))));
      }
    }
    return __float_as_int(largest) >> 23;
  }

  __device__ __forceinline__ void Store(const QueryReader<Params, Variant>& query, char* to, float factor = 1.f) const {
#pragma unroll TURNS < 4 ? TURNS : 4
    for (int turn = 0; turn < TURNS; ++turn) {
      const int id = turn * THREADS + int(Team::Index()), row = id / CHUNKS, chunk = id % CHUNKS;
      if (TILE * CHUNKS % THREADS != 0 && id >= TILE * CHUNKS) break;
      float x[8];
      if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = query.variant.QueryTransform(query.p, Loaded(turn, i));
      } else {
        query.Read(x, row, 8 * chunk);
      }
      if constexpr (ORDER == QueryOrder::kOddFirst) {
        T* odd = reinterpret_cast<T*>(to + Layout::Offset(row, chunk & ~1));
        T* even = reinterpret_cast<T*>(to + Layout::Offset(row, chunk | 1));
#pragma unroll
        for (int i = 0; i < 8; ++i) (i % 2 == 1 ? odd : even)[chunk % 2 * 4 + i / 2] = FromFloat<T>(x[i]);
      } else if constexpr (ORDER == QueryOrder::kPairs) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const int at = chunk % 2 * 8 + i;  // bytes in a chunk
          *reinterpret_cast<uint32_t*>(to + Layout::Offset(row, chunk & ~1) + at) =
              Pack<T>(x[i] * factor, x[i + 1] * factor);
          *reinterpret_cast<uint32_t*>(to + Layout::Offset(row, chunk | 1) + at) =
              Pack<T>(x[i + 2] * factor, x[i + 3] * factor);
        }
      } else {
        const uint4 packed{Pack<T>(x[0], x[1]), Pack<T>(x[2], x[3]), Pack<T>(x[4], x[5]), Pack<T>(x[6], x[7])};
        *reinterpret_cast<uint4*>(to + Layout::Offset(row, chunk)) = packed;
      }
    }
  }
};

}  // namespace attention
}  // namespace flashinfer
