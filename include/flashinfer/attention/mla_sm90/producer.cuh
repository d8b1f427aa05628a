// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: loads of queries and keys by the producer warpgroup.
//
// Each of the four warps loads one part of the keys: half of the columns of every second block, slab by slab as the slabs
// are released. The parts are released at different times (consumer.cuh), so no warp waits for a part while
// another part could be loaded. Page ids are loaded one block ahead. Pages of at least 8 keys are copied by TMA, box by box, a box being one page or 64 keys
// of a page by 64 columns. Smaller or odd pages are copied row by row with cp.async. (Loads of keys into L2, two blocks
// ahead, were tried on an H200: with 16 heads they cost 22 %, with 128 heads they gained nothing.)
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../common/kv_rows.cuh"
#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Copies by TMA of the keys of one part.
template <typename Params>
class BoxLoader {
 public:
  static constexpr int ARRIVALS = 1;  // at the mbarrier of a slab

  __device__ __forceinline__ BoxLoader(const Params& p, const CUtensorMap& latent, const CUtensorMap& rotary)
      : p_(p), latent_(&latent), rotary_(&rotary), box_rows_(min(int(p.page_size.divisor), KEYS)) {}

  /// Load the page ids of the block at `key`: lane i gets the page of box i.
  __device__ __forceinline__ void Ask(const WorkItem& item, int key) {
    asked_ = PageOf<true, true>(p_, item, key + int(threadIdx.x) % 32 * box_rows_);
  }
  /// Use the page ids that were loaded last.
  __device__ __forceinline__ void Take(int) { pages_ = asked_; }

  /// Load columns [column, column + 64) of the block at `key` to `slab`. Boxes without keys of the item are left out:
  /// consumers clear their rows.
  __device__ __forceinline__ void Load(const WorkItem& item, int key, bool is_rotary, int column, uint32_t slab,
                                       uint32_t full) const {
    const int boxes = (min(item.kv_end - key, KEYS) + box_rows_ - 1) / box_rows_;
    const int row = key - int(p_.page_size.Divide(key)) * int(p_.page_size.divisor);
    const bool is_leader = threadIdx.x % 32 == 0;
    if (is_leader) ptx::MbarrierArriveExpect(full, boxes * box_rows_ * hopper::SLAB_ROW_BYTES);
    for (int i = 0; i < boxes; ++i) {
      const int page = __shfl_sync(~0u, pages_, i);
      const uint32_t to = slab + i * box_rows_ * hopper::SLAB_ROW_BYTES;
      if (is_leader) ptx::LoadBox(to, is_rotary ? rotary_ : latent_, full, column, row, page);
    }
    __syncwarp();
  }

 private:
  const Params& p_;
  const CUtensorMap *latent_, *rotary_;
  const int box_rows_;
  int asked_ = 0, pages_ = 0;
};

/// Copies with cp.async of the keys of one part. Lane i holds the offsets of rows i and i + 32.
template <typename Params>
class RowLoader {
 public:
  static constexpr int ARRIVALS = 32;

  __device__ __forceinline__ RowLoader(const Params& p, const RowStrides<Params>& strides) : p_(p), strides_(strides) {}

  __device__ __forceinline__ void Ask(const WorkItem& item, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tokens_[i] = key + i * 32 + int(threadIdx.x) % 32;
      asked_[i] = PageOf<true, true>(p_, item, tokens_[i]);
    }
  }
  __device__ __forceinline__ void Take(int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowOffsets<Params> row = RowOf<true>(p_, strides_, WorkItem{}, tokens_[i], asked_[i]);
      latent_[i] = row.k, rotary_[i] = row.v;
    }
  }

  /// Rows without keys of the item are cleared.
  __device__ __forceinline__ void Load(const WorkItem& item, int key, bool is_rotary, int column, uint32_t slab,
                                       uint32_t full) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const auto* const data = (is_rotary ? p_.k_pe : p_.k) + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t held = is_rotary ? rotary_[half] : latent_[half];
#pragma unroll 2
      for (int i = lane / 8; i < 32; i += 4) {
        const char* const from = RowAt<Params>(data, __shfl_sync(~0u, held, i)) + chunk * 16;
        const int row = half * 32 + i;
        const uint32_t to = slab + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + chunk * 16);
        ptx::CopyAsync16(to, from, key + row < item.kv_end);
      }
    }
    ptx::MbarrierArriveCopies(full);
  }

 private:
  const Params& p_;
  const RowStrides<Params>& strides_;
  int tokens_[2] = {}, asked_[2] = {};
  uint32_t latent_[2] = {}, rotary_[2] = {};
};

/// Copies with cp.async of the keys of one part of an fp8 cache, which the same warp then converts in place: a row of a
/// slab is 64 bytes that arrive and 128 bytes that stay. Lane i has rows i and i + 32. All slabs of a part arrive at once
/// and are converted in order, so that their copies overlap.
template <typename Params>
class ConvertingLoader {
 public:
  using T = typename Params::DTypeQ;
  static constexpr int ARRIVALS = 32;

  __device__ __forceinline__ ConvertingLoader(const Params& p, const RowStrides<Params>& strides)
      : p_(p), strides_(strides) {}

  __device__ __forceinline__ void Ask(const WorkItem& item, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tokens_[i] = key + i * 32 + int(threadIdx.x) % 32;
      asked_[i] = PageOf<true, true>(p_, item, tokens_[i]);
      is_key_[i] = tokens_[i] < item.kv_end;
    }
  }
  /// Use the page ids that were loaded last, and load the scales of their keys for columns of part `half`.
  __device__ __forceinline__ void Take(int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowOffsets<Params> row = RowOf<true>(p_, strides_, WorkItem{}, tokens_[i], asked_[i]);
      latent_[i] = row.k, rotary_[i] = row.v;
      if (p_.latent_scales == nullptr) continue;
      float2 scales{};  // the scales of cleared rows are 0: no entry of the cache may turn them into NaN
      if (is_key_[i]) {
        const int size = int(p_.page_size.divisor), entry = tokens_[i] - int(p_.page_size.Divide(tokens_[i])) * size;
        const int64_t at = (int64_t(asked_[i]) * size + entry) * (LATENT / SCALED) + half * (HALF / SCALED);
        scales = *reinterpret_cast<const float2*>(p_.latent_scales + at);
      }
      scales_[i][0] = Pack<T>(scales.x, scales.x), scales_[i][1] = Pack<T>(scales.y, scales.y);
    }
  }

  /// Copy columns [column, column + 64) of the block at `key`. Rows without keys of the item are cleared.
  __device__ __forceinline__ void Copy(const WorkItem& item, int key, bool is_rotary, int column, uint32_t slab) const {
    const int lane = threadIdx.x % 32, chunk = lane % 4;
    const auto* const data = (is_rotary ? p_.k_pe : p_.k) + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t held = is_rotary ? rotary_[half] : latent_[half];
#pragma unroll 2
      for (int i = lane / 4; i < 32; i += 8) {
        const char* const from = RowAt<Params>(data, __shfl_sync(~0u, held, i)) + chunk * 16;
        const int row = half * 32 + i;
        ptx::CopyAsync16(slab + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + 2 * chunk * 16), from,
                         key + row < item.kv_end);
      }
    }
    ptx::CopyCommit();
  }

  /// Convert a slab that has arrived in all lanes, and release it to the consumers. `group`: scale of the part's columns;
  /// negative: none.
  __device__ __forceinline__ void Convert(uint32_t slab, int group, uint32_t full) const {
    const bool is_scaled = group >= 0 && p_.latent_scales != nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 32 + int(threadIdx.x) % 32;
      const uint32_t scale = group == 1 ? scales_[half][1] : scales_[half][0];
      auto place = [&](int chunk) { return slab + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + chunk * 16); };
      float4 stored[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) stored[i] = ptx::LoadShared16(place(2 * i));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t words[4] = {__float_as_uint(stored[i].x), __float_as_uint(stored[i].y),
                                   __float_as_uint(stored[i].z), __float_as_uint(stored[i].w)};
        uint32_t x[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t even, odd;
          ExpandFp8<T, typename Params::DTypeKV>(words[w], even, odd);
          x[2 * w] = __byte_perm(even, odd, 0x5410), x[2 * w + 1] = __byte_perm(even, odd, 0x7632);
        }
        if (is_scaled) {
#pragma unroll
          for (int w = 0; w < 8; ++w) x[w] = Multiply2<T>(x[w], scale);
        }
        ptx::StoreShared16(place(2 * i), uint4{x[0], x[1], x[2], x[3]});
        ptx::StoreShared16(place(2 * i + 1), uint4{x[4], x[5], x[6], x[7]});
      }
    }
    ptx::FenceAsyncProxy();
    ptx::MbarrierArrive(full);
  }

 private:
  static constexpr int SCALED = 128;  // columns of a scale
  const Params& p_;
  const RowStrides<Params>& strides_;
  int tokens_[2] = {}, asked_[2] = {};
  bool is_key_[2] = {};
  uint32_t latent_[2] = {}, rotary_[2] = {}, scales_[2][2] = {};
};

/// Copy 16 rows of the query tile from `first`, by one warp; rows beyond the request are cleared.
template <typename Params>
__device__ __forceinline__ void LoadQueryRows(const Params& p, const WorkItem& item, int first, uint32_t tile) {
  const int lane = threadIdx.x % 32, group = p.group.divisor, rows = item.qo_len * group;
  auto copy = [&](const auto* data, int64_t stride_n, int64_t stride_h, int row, int slab, int chunk) {
    const int r = item.row_begin + row, token = p.group.Divide(min(r, rows - 1)),
              head = min(r, rows - 1) - token * group;
    const auto* const from = data + (item.qo_begin + token) * stride_n + head * stride_h;
    const uint32_t to = tile + slab * SLAB_BYTES + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + chunk % 8 * 16);
    ptx::CopyAsync16(to, from + chunk * 8, r < rows);
  };
#pragma unroll 2
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int chunk = lane; chunk < LATENT / 8; chunk += 32) {
      copy(p.q, p.q_stride_n, p.q_stride_h, first + i, chunk / 8, chunk);
    }
  }
  if constexpr (Params::HEAD_DIM_PE > 0) {
#pragma unroll 2
    for (int i = lane / 8; i < 16; i += 4)
      copy(p.q_pe, p.q_pe_stride_n, p.q_pe_stride_h, first + i, ROTARY_SLAB, lane % 8);
  }
}

/// Keys of one part of a block, whose slabs are loaded as they are released. Called by all lanes of a warp.
template <typename Params, typename Loader>
__device__ __forceinline__ void LoadPart(const Shared& shared, Loader& loader, const WorkItem& item, int key,
                                         int buffer, int half, uint32_t parity) {
  const uint32_t keys = shared.Keys(buffer);
  if (HasRotary(buffer, half)) {
    const uint32_t full = shared.Full(buffer, ROTARY_SLAB);
    ptx::MbarrierWait(shared.Empty(buffer, ROTARY_SLAB), parity);
    if constexpr (Params::HEAD_DIM_PE > 0) {
      loader.Load(item, key, true, 0, keys + ROTARY_SLAB * SLAB_BYTES, full);
    } else if (Loader::ARRIVALS > 1 || threadIdx.x % 32 == 0) {
      ptx::MbarrierArrive(full);  // the place is free for weights
    }
  }
#pragma unroll 1
  for (int slab = half * HALF_SLABS; slab < (half + 1) * HALF_SLABS; ++slab) {
    ptx::MbarrierWait(shared.Empty(buffer, slab), parity);
    loader.Load(item, key, false, slab * SLAB_COLUMNS, keys + slab * SLAB_BYTES, shared.Full(buffer, slab));
  }
}

/// Keys of one part of a block of an fp8 cache.
template <typename Params>
__device__ __forceinline__ void ConvertPart(const Shared& shared, ConvertingLoader<Params>& loader,
                                            const WorkItem& item, int key, int buffer, int half, uint32_t parity) {
  const uint32_t keys = shared.Keys(buffer), rotary = keys + ROTARY_SLAB * SLAB_BYTES;
  const bool has_rotary = HasRotary(buffer, half);
  const int first = half * HALF_SLABS;
  auto slab_at = [&](int i) { return keys + (first + i) * SLAB_BYTES; };
  if (has_rotary) {
    ptx::MbarrierWait(shared.Empty(buffer, ROTARY_SLAB), parity);
    if constexpr (Params::HEAD_DIM_PE > 0) {
      loader.Copy(item, key, true, 0, rotary);
    } else {
      ptx::MbarrierArrive(shared.Full(buffer, ROTARY_SLAB));  // the place is free for weights
    }
  }
#pragma unroll 1
  for (int i = 0; i < HALF_SLABS; ++i) {
    ptx::MbarrierWait(shared.Empty(buffer, first + i), parity);
    loader.Copy(item, key, false, (first + i) * SLAB_COLUMNS, slab_at(i));
  }
  static_assert(HALF_SLABS == 4, "copies that are still on their way");
  if constexpr (Params::HEAD_DIM_PE > 0) {
    if (has_rotary) {
      ptx::CopyWait<4>();
      __syncwarp();
      loader.Convert(rotary, -1, shared.Full(buffer, ROTARY_SLAB));
    }
  }
#pragma unroll 1
  for (int i = 0; i < HALF_SLABS; ++i) {
    if (i == 0) {
      ptx::CopyWait<3>();
    } else if (i == 1) {
      ptx::CopyWait<2>();
    } else if (i == 2) {
      ptx::CopyWait<1>();
    } else {
      ptx::CopyWait<0>();
    }
    __syncwarp();
    loader.Convert(slab_at(i), i / 2, shared.Full(buffer, first + i));
  }
}

/// Load the queries and keys of all items of the block. Run by the four warps of the producer warpgroup.
template <typename Params, typename Loader>
__device__ __forceinline__ void Produce(const Params& p, const WorkList& work, const Shared& shared, Loader& loader) {
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), buffer = warp % 2, half = warp / 2;
  uint32_t parity = 1, query_parity = 1;
  auto load_query = [&](const WorkItem& item) {
    ptx::MbarrierWait(shared.QueryEmpty(), query_parity);
    query_parity ^= 1;
    LoadQueryRows(p, item, warp * 16, shared.Query());
    ptx::MbarrierArriveCopies(shared.QueryFull());
  };
  bool is_first = true;
  ItemList<Params> list(p, work);
  for (WorkItem item = list.First(); item.request >= 0;) {
    const int blocks = BlocksOf(item);
    if (blocks > 0) loader.Ask(item, item.kv_start + buffer * KEYS);
    if (blocks > 0 && is_first) load_query(item);  // while the page ids are on their way
    for (int block = buffer; block < blocks + buffer; block += 2) {
      const int key = item.kv_start + block * KEYS;
      if (block < blocks) {
        loader.Take(half);
        if (block + 2 < blocks) loader.Ask(item, key + 2 * KEYS);
        if constexpr (IS_FP8<typename Params::DTypeKV>) {
          ConvertPart(shared, loader, item, key, buffer, half, parity);
        } else {
          LoadPart<Params>(shared, loader, item, key, buffer, half, parity);
        }
        parity ^= 1;
      }
      // The first keys of a further item are on their way before this waits for the query's place.
      if (block == buffer && !is_first) load_query(item);
    }
    if (blocks > 0) is_first = false;
    if (!list.Next(item)) break;
  }
}

#endif

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
