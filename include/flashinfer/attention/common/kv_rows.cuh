// SPDX-License-Identifier: Apache-2.0
// Addresses of rows of keys and values in global memory, and the layout of tiles of rows in shared memory.
#pragma once
#include <initializer_list>

#include "../../ptx/cp_async.cuh"
#include "../../utils.cuh"
#include "convert.cuh"

namespace flashinfer {
namespace attention {

/// Type of K and V in shared memory: as stored, except NVFP4, which is expanded by the copy.
template <typename Params>
using SharedKV =
    std::conditional_t<IS_FP4<typename Params::DTypeKV>, typename Params::DTypeQ, typename Params::DTypeKV>;

/// Layout of rows of ROW_BYTES in shared memory: the 16-byte chunks of 8 rows at one column are in different banks.
template <int ROW_BYTES>
struct RowLayout {
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;
  static constexpr int PITCH =
      SWIZZLED || CHUNKS % 2 == 1 ? ROW_BYTES : ROW_BYTES + 16;  // padded to an odd number of chunks
  static __device__ __forceinline__ uint32_t Offset(int row, int chunk) {
    return row * PITCH + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16;
  }
  /// Move `address`, a chunk of row r, by `rows` rows that have no bit in common with r; the tile starts at a multiple
  /// of 128 bytes.
  static __device__ __forceinline__ uint32_t Moved(uint32_t address, int rows) {
    return (SWIZZLED ? address ^ ((rows & 7) * 16) : address) + rows * PITCH;
  }
  /// Move `address`, chunk 0 or 1 of a row, by `pairs` of chunks; the tile starts at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32_t FusedLists(uint32_t address, int pairs) {
    return SWIZZLED ? (address ^ (pairs % 4 * 32)) + pairs / 4 * 128 : address + pairs * 32;
  }
};

/// Offset of the row of a token in k and v: in units of 16 bytes, to which every row is aligned (RowsAligned), or in
/// bytes (NVFP4). 32 bits reach 64 GiB. SHARED_KV: v is the row of k_pe.
template <typename Params>
using RowOffset = std::conditional_t<IS_FP4<typename Params::DTypeKV>, int64_t, uint32_t>;
template <typename Params>
struct RowOffsets {
  RowOffset<Params> k, v;
};

/// Strides in these units, computed once on the host so that kernels use 32-bit address arithmetic.
template <typename Params>
struct RowStrides {
  RowOffset<Params> k_page, k_n, k_h, v_page, v_n, v_h;

  explicit RowStrides(const Params& p) {
    constexpr int64_t UNIT = IS_FP4<typename Params::DTypeKV> ? 1 : 16 / sizeof(typename Params::DTypeKV);
    auto in_units = [](int64_t stride) { return RowOffset<Params>(stride / UNIT); };
    k_page = in_units(p.k_stride_page);
    k_n = in_units(p.k_stride_n);
    k_h = in_units(p.k_stride_h);
    if constexpr (Params::SHARED_KV) {
      v_page = in_units(p.k_pe_stride_page);
      v_n = in_units(p.k_pe_stride_n);
      v_h = 0;
    } else {
      v_page = in_units(p.v_stride_page);
      v_n = in_units(p.v_stride_n);
      v_h = in_units(p.v_stride_h);
    }
  }
};

template <typename Params>
__device__ __forceinline__ const char* RowAt(const typename Params::DTypeKV* data, RowOffset<Params> offset) {
  constexpr int64_t UNIT = IS_FP4<typename Params::DTypeKV> ? 1 : 16;
  return reinterpret_cast<const char*>(data) + UNIT * offset;
}

/// Row offsets of a token; `page` is its page-table entry.
template <bool PAGED, typename Params>
__device__ __forceinline__ RowOffsets<Params> RowOf(const Params& p, const RowStrides<Params>& strides,
                                                    const WorkItem& item, int token, int page) {
  using Offset = RowOffset<Params>;
  const Offset head = Offset(item.kv_head);
  if constexpr (PAGED) {
    const Offset entry = Offset(token - int(p.page_size.Divide(token)) * int(p.page_size.divisor));
    return {Offset(page) * strides.k_page + entry * strides.k_n + head * strides.k_h,
            Offset(page) * strides.v_page + entry * strides.v_n + head * strides.v_h};
  } else {
    static_assert(!Params::SHARED_KV, "latent caches are paged");
    const Offset row = Offset(item.kv_begin) + Offset(token);
    return {row * strides.k_n + head * strides.k_h, row * strides.v_n + head * strides.v_h};
  }
}

/// Page-table entry of a token, clamped to existing tokens so that any token may be passed. HAS_KEYS: the item has at
/// least one key.
template <bool PAGED, bool HAS_KEYS = false, typename Params>
__device__ __forceinline__ int PageOf(const Params& p, const WorkItem& item, int token) {
  if constexpr (PAGED) {
    const int last = item.kv_end - 1;
    if (!HAS_KEYS && last < 0) return 0;
    return int(p.kv_indices[item.kv_begin + p.page_size.Divide(min(token, last))]);
  } else {
    return 0;
  }
}

/// Expand chunk `chunk` of a row of an NVFP4 cache. `sf` is the first scale of the row.
template <typename T>
__device__ __forceinline__ void ExpandChunk(uint32_t to, const char* row, const uint8_t* sf, int chunk, bool valid) {
  uint4 x{};
  if (valid) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= uint32_t(uint8_t(row[4 * chunk + i])) << (8 * i);
    x = ExpandFp4<T>(codes, sf[chunk / 2]);
  }
  ptx::StoreShared16(to, x);
}

/// Return true if every row of the tensors starts at a multiple of 16 bytes, which the kernels require.
template <typename Params>
bool RowsAligned(const Params& p) {
  auto fits = [](const auto* data, std::initializer_list<int64_t> strides) {
    bool aligned = IsAligned(data, 16);
    for (int64_t stride : strides) aligned = aligned && stride * int64_t(sizeof(*data)) % 16 == 0;
    return aligned;
  };
  bool aligned = fits(p.q, {p.q_stride_n, p.q_stride_h}) && fits(p.o, {p.o_stride_n, p.o_stride_h});
  if constexpr (!IS_FP4<typename Params::DTypeKV>) {
    aligned = aligned && fits(p.k, {p.k_stride_page, p.k_stride_n, p.k_stride_h});
    if constexpr (Params::SHARED_KV) {
      aligned = aligned && fits(p.k_pe, {p.k_pe_stride_page, p.k_pe_stride_n});
    } else {
      aligned = aligned && fits(p.v, {p.v_stride_page, p.v_stride_n, p.v_stride_h});
    }
  }
  return aligned;
}

}  // namespace attention
}  // namespace flashinfer
