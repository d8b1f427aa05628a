// SPDX-License-Identifier: Apache-2.0
// Row state of a warp of the prefill kernel (kernel.cuh): softmax state and output, and how they are written.
#pragma once
#include "../../ptx/barrier.cuh"
#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace prefill {

/// Rows of a warp: output o, its divisor d (each lane holds a part of it), exponent m (see Rebase).
template <typename Tr, typename Variant>
struct RowState {
  using Params = typename Tr::Params;
  static constexpr int M_TILES = Tr::M_TILES, N_BLOCKS = Tr::WARP_COLUMNS / 16;

  const Params& p;
  Variant variant;
  const WorkItem& item;
  int row0, column0;  // first row and first value column of the warp in the tile
  int key0;           // first key of the warp's scores in a step
  uint32_t weights;   // shared-memory buffer of weights, exchanged between the warps that share rows
  float* tops;
  float o[M_TILES][2 * N_BLOCKS][4];
  float m[M_TILES][2], d[M_TILES][2];
  int full_begin, full_end;  // range of keys that all rows see

  __device__ __forceinline__ RowState(const Params& p, const WorkItem& item, [[maybe_unused]] char* exchange)
      : p(p), variant(p, item.request, nullptr), item(item) {
    const int warp = threadIdx.x / 32, group = warp % Tr::ROW_WARPS, rank = warp / Tr::ROW_WARPS;
    row0 = group * (16 * M_TILES);
    column0 = rank * Tr::WARP_COLUMNS;
    key0 = 0;
    if constexpr (Tr::SPLITS_KEYS) {
      key0 = rank * Tr::KEYS_WARP;
      weights = ptx::SharedAddress(exchange) + group * (Tr::KEYS / 16 * M_TILES * 512) + threadIdx.x % 32 * 16;
      tops = reinterpret_cast<float*>(exchange + Tr::WEIGHT_BYTES) + group * (Tr::COLUMN_WARPS * 16 * M_TILES);
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

  __device__ __forceinline__ void Start() {
    const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
    full_begin = mask.First(TokenOf(Tr::TILE - 1));
    full_end = min(mask.End(TokenOf(0)), item.kv_end);
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m[t][i] = -math::inf;
        d[t][i] = 0.f;
        float scale = 1.f;
        if (item.is_first) variant.update_m_d(p, 0, HeadOf(Row(t, i)), m[t][i], d[t][i], scale);
        if (threadIdx.x % 4 != 0 || key0 != 0) d[t][i] = 0.f;  // d is summed over the lanes of a row
      }
#pragma unroll
      for (int n = 0; n < 2 * N_BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[t][n][i] = 0.f;
      }
    }
  }

  /// Combine one number per row, equal in the lanes of a row, with those of the other warps that share the rows.
  template <typename F>
  __device__ __forceinline__ void Exchange([[maybe_unused]] float (&x)[M_TILES][2], const F& combine) {
    if constexpr (Tr::SPLITS_KEYS) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (threadIdx.x % 4 == 0) tops[key0 / Tr::KEYS_WARP * (16 * M_TILES) + Row(t, i) - row0] = x[t][i];
        }
      }
      ptx::BarrierSync(1 + row0 / (16 * M_TILES), 32 * Tr::COLUMN_WARPS);
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[t][i] = tops[Row(t, i) - row0];
#pragma unroll
          for (int rank = 1; rank < Tr::COLUMN_WARPS; ++rank) {
            x[t][i] = combine(x[t][i], tops[rank * (16 * M_TILES) + Row(t, i) - row0]);
          }
        }
      }
    }
  }

  /// Normalise and write. Results go through shared memory (where the query was) so that stores are 16 bytes wide.
  __device__ __forceinline__ void Finish(const WorkList& work, char* shared_o) {
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) d[t][i] = GroupSum(d[t][i], 4);
    }
    Exchange(d, [](float a, float b) { return a + b; });
    Meet();
    if (item.slot >= 0) {
      WritePartial(work);
      return;
    }
    if constexpr (BY_MATRIX) {
      StageMatrices(ptx::SharedAddress(shared_o));
    } else {
      StageRows(ptx::SharedAddress(shared_o));
    }
    Meet();
    WriteRows(shared_o);
  }

 private:
  /// True if the results of a warp overwrite only the queries of the same warp.
  static constexpr bool OWN_ROWS = Tr::COLUMN_WARPS == 1 && Tr::QLayout::PITCH == Tr::OLayout::PITCH;
  /// True if a row is multiplied by one factor (hooks of a user variant may do anything) and lanes hold its columns in
  /// matrix order. Takes a third of the instructions of StageRows.
  static constexpr bool BY_MATRIX = HOOKS_ACCEPT_PADDING<Variant> && !Tr::FP8 && ptx::HAS_ST_MATRIX;
  // Columns of a lane in a block of 16: 4c .. 4c + 3 (fp8), or 2c, 2c + 1, 2c + 8, 2c + 9.
  static constexpr int FIRST = Tr::FP8 ? 4 : 2, SECOND = Tr::FP8 ? 2 : 8;

  __device__ __forceinline__ float Top(int t, int i) const { return Variant::use_softmax ? m[t][i] : 0.f; }
  __device__ __forceinline__ float Total(int t, int i) const { return Variant::use_softmax ? d[t][i] : 1.f; }
  __device__ __forceinline__ float Lse(int t, int i) const {
    const float total = Total(t, i);
    return total > 0.f ? Top(t, i) + __log2f(total) : -math::inf;
  }
  /// Return true if this lane writes the log-sum-exp of its row.
  __device__ __forceinline__ bool HasScore(int row, int rows) const {
    return threadIdx.x % 4 == 0 && column0 == 0 && row < rows;
  }
  __device__ __forceinline__ void WriteLse(int t, int i, int rows) const {
    const int row = Row(t, i);
    if (p.lse == nullptr || !HasScore(row, rows)) return;
    p.lse[(int64_t(item.qo_begin) + TokenOf(row)) * p.num_qo_heads + HeadOf(row)] = Lse(t, i) * p.lse_scale;
  }

  /// Call f(n, x) for each block n of 16 columns of a row, of which the lane holds 4.
  template <typename F>
  __device__ __forceinline__ void EachBlock(int t, int i, const F& f) {
    const int row = Row(t, i), qo_idx = TokenOf(row), head = HeadOf(row);
    float top = Top(t, i), total = Total(t, i);
#pragma unroll
    for (int n = 0; n < N_BLOCKS; ++n) {
      if (Tr::D_VO % Tr::WARP_COLUMNS != 0 && column0 + 16 * n >= Tr::D_VO) continue;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float y = Tr::FP8 ? o[t][2 * n + j % 2][2 * i + j / 2] : o[t][2 * n + j / 2][2 * i + j % 2];
        x[j] = variant.OutputTransform(p, y, item.request, qo_idx, head, top, total, 1.f);
      }
      f(n, x);
    }
  }

  __device__ __forceinline__ void WritePartial(const WorkList& work) {
    const int rows = Rows();
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Row(t, i);
        if (row >= rows) continue;
        const int64_t slot_row = int64_t(item.slot) * Tr::TILE + row;
        if (HasScore(row, rows)) work.partial_lse[slot_row] = Lse(t, i);
        float* to = work.partial_o + slot_row * Tr::D_VO + column0 + FIRST * (threadIdx.x % 4);
        EachBlock(t, i, [&](int n, const float (&x)[4]) {
          *reinterpret_cast<float2*>(to + 16 * n) = make_float2(x[0], x[1]);
          *reinterpret_cast<float2*>(to + 16 * n + SECOND) = make_float2(x[2], x[3]);
        });
      }
    }
  }

  __device__ __forceinline__ void StageRows(uint32_t shared_o) {
    using To = typename Params::DTypeO;
    const int c = threadIdx.x % 4, rows = Rows();
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Row(t, i);
        WriteLse(t, i, rows);
        if (row >= rows && !HOOKS_ACCEPT_PADDING<Variant>) continue;
        // Address of the first pair of numbers in block 0; the second is in the next chunk, or behind it (fp8).
        const int chunk = Tr::FP8 ? c / 2 : 0, byte = Tr::FP8 ? c % 2 * 8 : c * 4;
        const uint32_t low = shared_o + Tr::OLayout::Offset(row, chunk) + byte;
        const uint32_t high = Tr::FP8 ? low + 4 : shared_o + Tr::OLayout::Offset(row, 1) + byte;
        EachBlock(t, i, [&](int n, const float (&x)[4]) {
          const int block = Tr::COLUMN_WARPS == 1 ? n : column0 / 16 + n;
          ptx::StoreShared4(Tr::OLayout::FusedLists(low, block), Pack<To>(x[0] * p.out_scale, x[1] * p.out_scale));
          ptx::StoreShared4(Tr::OLayout::FusedLists(high, block), Pack<To>(x[2] * p.out_scale, x[3] * p.out_scale));
        });
      }
    }
  }

  __device__ __forceinline__ void StageMatrices(uint32_t shared_o) {
    using To = typename Params::DTypeO;
    const int lane = threadIdx.x % 32, rows = Rows();
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = Top(t, i), total = Total(t, i);
        factor[i] = variant.OutputTransform(p, p.out_scale, item.request, 0, 0, top, total, 1.f);
        WriteLse(t, i, rows);
      }
      const uint32_t at = shared_o + Tr::OLayout::Offset(row0 + 16 * t + lane % 16, lane / 16);
#pragma unroll
      for (int n = 0; n < N_BLOCKS; ++n) {
        if (Tr::D_VO % Tr::WARP_COLUMNS != 0 && column0 + 16 * n >= Tr::D_VO) continue;
        uint32_t x[4];  // rows 0 and 8 of the lane's columns in the first 8 of the block, then in the others
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* y = &o[t][2 * n + j / 2][j % 2 * 2];
          x[j] = Pack<To>(y[0] * factor[j % 2], y[1] * factor[j % 2]);
        }
        ptx::StMatrix(Tr::OLayout::FusedLists(at, Tr::COLUMN_WARPS == 1 ? n : column0 / 16 + n), x);
      }
    }
  }

  __device__ __forceinline__ void WriteRows(const char* shared_o) const {
    const int lane = threadIdx.x % 32, rows = Rows();
    const int first = OWN_ROWS ? row0 + lane / 8 : int(threadIdx.x) / 8,
              end = OWN_ROWS ? row0 + 16 * M_TILES : Tr::TILE;
#pragma unroll 4
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

  /// Wait for the warps that share rows of shared memory with this one.
  __device__ __forceinline__ void Meet() const {
    if constexpr (OWN_ROWS) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

}  // namespace prefill
}  // namespace attention
}  // namespace flashinfer
