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
  __device__ __forceinline__ void Take() { pages_ = asked_; }

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
  __device__ __forceinline__ void Take() {
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
#pragma unroll 2
  for (int i = lane / 8; i < 16; i += 4)
    copy(p.q_pe, p.q_pe_stride_n, p.q_pe_stride_h, first + i, ROTARY_SLAB, lane % 8);
}

/// Load the queries and keys of all items of the block. Run by the four warps of the producer warpgroup.
template <typename Params, typename Loader>
__device__ __forceinline__ void Produce(const Params& p, const WorkList& work, const Shared& shared, Loader& loader) {
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), buffer = warp % 2, half = warp / 2;
  const bool has_rotary = HasRotary(buffer, half);
  const uint32_t keys = shared.Keys(buffer);
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
        loader.Take();
        if (block + 2 < blocks) loader.Ask(item, key + 2 * KEYS);
        if (has_rotary) {
          ptx::MbarrierWait(shared.Empty(buffer, ROTARY_SLAB), parity);
          loader.Load(item, key, true, 0, keys + ROTARY_SLAB * SLAB_BYTES, shared.Full(buffer, ROTARY_SLAB));
        }
#pragma unroll 1
        for (int slab = half * HALF_SLABS; slab < (half + 1) * HALF_SLABS; ++slab) {
          ptx::MbarrierWait(shared.Empty(buffer, slab), parity);
          loader.Load(item, key, false, slab * SLAB_COLUMNS, keys + slab * SLAB_BYTES, shared.Full(buffer, slab));
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
