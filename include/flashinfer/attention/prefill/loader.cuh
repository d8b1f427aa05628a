// SPDX-License-Identifier: Apache-2.0
// Copies of keys, values and queries from global to shared memory for the prefill kernel (kernel.cuh).
#pragma once
#include "../common/tile.cuh"

namespace flashinfer {
namespace attention {
namespace prefill {

/// True if queries are multiplied as stored and their rows are whole lines of 128 bytes.
template <typename Tr, typename Variant>
inline constexpr bool QUERY_AS_STORED = false;
template <typename Tr, bool CUSTOM_MASK, bool SLIDING_WINDOW, bool SOFT_CAP, bool ALIBI>
inline constexpr bool QUERY_AS_STORED<Tr, DefaultAttention<CUSTOM_MASK, SLIDING_WINDOW, SOFT_CAP, ALIBI>> =
    Tr::QLayout::SWIZZLED && !Tr::FP8 && !Tr::Params::SHARED_KV &&
    Tr::Params::POS_ENCODING != PosEncodingMode::kRoPELlama;

/// Copy the query tile to shared memory without waiting; the copies belong to the next commit group.
template <typename Tr>
__device__ __forceinline__ void CopyQuery(const typename Tr::Params& p, const WorkItem& item, uint32_t to) {
  using Layout = typename Tr::QLayout;
  constexpr int ROWS = Tr::THREADS / 8;  // 8 threads copy a row; all rows of a thread have the same swizzle
  const int first = threadIdx.x / 8, chunk = threadIdx.x % 8, rows = item.qo_len * int(p.group.divisor);
  to += Layout::Offset(first, chunk);
#pragma unroll 4
  for (int row = first; row < Tr::TILE; row += ROWS, to += ROWS * Layout::PITCH) {
    const int at = item.row_begin + row, token = p.group.Divide(at);
    const int head = item.kv_head * int(p.group.divisor) + at - token * int(p.group.divisor);
    const auto* from = p.q + (int64_t(item.qo_begin) + token) * p.q_stride_n + head * p.q_stride_h + 8 * chunk;
#pragma unroll
    for (int line = 0; line < Layout::CHUNKS / 8; ++line) {
      ptx::CopyAsync16(to + 128 * line, from + 64 * line, at < rows);
    }
  }
}

/// Loader of keys and values, run by all threads of the block.
template <typename Tr, bool PAGED>
struct Loader {
  using Params = typename Tr::Params;
  const Params& p;
  const RowStrides<Params>& strides;
  const WorkItem& item;
  RowOffsets<Params>* offsets;  // [2][KEYS] in shared memory: row offsets of two steps
  int page = 0;                 // page of key `threadIdx.x` two steps ahead, in flight
  RowOffsets<Params> start;     // offset of the first row that this thread copies, at token 0 of ragged keys

  /// True for rows of whole lines of 128 bytes: 8 threads copy a row, so that a thread has few rows and one address per
  /// row.
  static constexpr bool BY_LINE =
      Tr::KLayout::SWIZZLED && Tr::D_VO * sizeof(typename Tr::KV) % 128 == 0 && !IS_FP4<typename Params::DTypeKV>;
  static constexpr bool HAS_TABLE = PAGED || !BY_LINE;

  __device__ __forceinline__ Loader(const Params& p, const RowStrides<Params>& strides, const WorkItem& item,
                                    RowOffsets<Params>* offsets)
      : p(p), strides(strides), item(item), offsets(offsets) {
    if constexpr (!PAGED) start = RowOf<false>(p, strides, item, int(threadIdx.x) / 8, 0);
  }

  /// Load page-table entries: each thread below KEYS handles one row, one step before the entry is used.
  __device__ __forceinline__ void AskPage(int token) {
    if (PAGED && threadIdx.x < Tr::KEYS) page = PageOf<PAGED>(p, item, token + int(threadIdx.x));
  }
  __device__ __forceinline__ void StoreOffset(int token, int buffer) {
    if (HAS_TABLE && threadIdx.x < Tr::KEYS) {
      offsets[buffer * Tr::KEYS + threadIdx.x] = RowOf<PAGED>(p, strides, item, token + int(threadIdx.x), page);
    }
  }

  template <bool K, bool V>
  __device__ __forceinline__ void Issue(int token, int buffer, uint32_t to) {
    if constexpr (BY_LINE) {
      CopyLines<K, V>(token, buffer, to);
    } else {
      if constexpr (K) Copy<typename Tr::KLayout, true>(token, buffer, to);
      if constexpr (V && !Params::SHARED_KV) Copy<typename Tr::VLayout, false>(token, buffer, to + Tr::K_BYTES);
    }
    ptx::CopyCommit();
  }

  template <bool K, bool V>
  __device__ __forceinline__ void CopyLines(int token, int buffer, uint32_t to) {
    constexpr int ROWS = Tr::THREADS / 8, TURNS = (Tr::KEYS + ROWS - 1) / ROWS;
    static_assert(ROWS % 8 == 0, "the rows of a thread are swizzled alike");
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8, room = item.kv_end - token - first;
    if (ROWS > Tr::KEYS && first >= Tr::KEYS) return;
    RowOffsets<Params> at[TURNS];  // loaded before the copies, which shared-memory reads could not overtake
    if constexpr (PAGED) {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) at[i] = offsets[buffer * Tr::KEYS + first + i * ROWS];
    } else {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        const auto rows = RowOffset<Params>(token + i * ROWS);
        at[i] = {start.k + rows * strides.k_n, start.v + rows * strides.v_n};
      }
    }
    constexpr int V_LINES = Tr::D_VO * int(sizeof(typename Tr::KV)) / 128, LINES = Tr::KLayout::CHUNKS / 8;
    const uint32_t k_to = to + Tr::KLayout::Offset(first, chunk);
    const uint32_t v_to = to + Tr::K_BYTES + Tr::VLayout::Offset(first, chunk);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const bool valid = i * ROWS < room;
      auto copy = [&](uint32_t target, const typename Params::DTypeKV* data, RowOffset<Params> row, int lines) {
        const char* from = RowAt<Params>(data, row) + 16 * chunk;
#pragma unroll
        for (int line = 0; line < lines; ++line) ptx::CopyAsync16(target + 128 * line, from + 128 * line, valid);
      };
      const uint32_t k_row = k_to + i * ROWS * Tr::KLayout::PITCH;
      if constexpr (Params::SHARED_KV) {
        copy(k_row, p.k, at[i].k, V_LINES);
        copy(k_row + 128 * V_LINES, p.k_pe, at[i].v, LINES - V_LINES);
      } else {
        if constexpr (K) copy(k_row, p.k, at[i].k, LINES);
        if constexpr (V) copy(v_to + i * ROWS * Tr::VLayout::PITCH, p.v, at[i].v, V_LINES);
      }
    }
  }

  template <typename Layout, bool KEY>
  __device__ __forceinline__ void Copy(int token, int buffer, uint32_t to) {
    constexpr int TOTAL = Tr::KEYS * Layout::CHUNKS;
#pragma unroll
    for (int i = 0; i < (TOTAL + Tr::THREADS - 1) / Tr::THREADS; ++i) {
      const int id = i * Tr::THREADS + int(threadIdx.x), row = id / Layout::CHUNKS, chunk = id % Layout::CHUNKS;
      if (TOTAL % Tr::THREADS != 0 && id >= TOTAL) break;
      const bool valid = token + row < item.kv_end;
      const RowOffsets<Params> at = offsets[buffer * Tr::KEYS + row];
      const uint32_t target = to + Layout::Offset(row, chunk);
      if constexpr (Params::SHARED_KV) {
        constexpr int LATENT = Tr::D_VO * int(sizeof(typename Tr::KV)) /
                               16;  // number of chunks that come from k; the others come from k_pe
        const char* from = chunk < LATENT ? RowAt<Params>(p.k, at.k) + 16 * chunk
                                          : RowAt<Params>(p.k_pe, at.v) + 16 * (chunk - LATENT);
        ptx::CopyAsync16(target, from, valid);
      } else {
        const char* from = KEY ? RowAt<Params>(p.k, at.k) : RowAt<Params>(p.v, at.v);
        if constexpr (IS_FP4<typename Params::DTypeKV>) {
          const int64_t sf = ScaleOffset<KEY>(token + row);
          ExpandChunk<typename Tr::T>(target, from, (KEY ? p.k_sf : p.v_sf) + sf, chunk, valid);
        } else {
          ptx::CopyAsync16(target, from + 16 * chunk, valid);
        }
      }
    }
  }

  template <bool KEY>
  __device__ __forceinline__ int64_t ScaleOffset(int token) const {
    const int64_t page_stride = KEY ? p.k_sf_stride_page : p.v_sf_stride_page,
                  n = KEY ? p.k_sf_stride_n : p.v_sf_stride_n;
    const int64_t head = item.kv_head * (KEY ? p.k_sf_stride_h : p.v_sf_stride_h);
    if constexpr (PAGED) {
      const int index = p.page_size.Divide(token);
      if (token >= item.kv_end) return 0;
      return p.kv_indices[item.kv_begin + index] * page_stride + (token - index * int(p.page_size.divisor)) * n + head;
    } else {
      return (int64_t(item.kv_begin) + token) * n + head;
    }
  }
};

}  // namespace prefill
}  // namespace attention
}  // namespace flashinfer
