// SPDX-License-Identifier: Apache-2.0
// Producers of the Hopper prefill kernel: queries by TMA, keys and values by TMA or by cp.async. Keys run one step
// ahead of values, because their products do. The keys of the next item are loaded while consumers finish the current
// one; its query follows as soon as they no longer need the old one.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "../common/kv_rows.cuh"
#include "boxes.h"
#include "items.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Order in which a producer fills the rings. `Self` has Find(item, step), which looks up where the rows of a step are;
/// LoadKeys() for that step, `ahead` tiles before the next values; LoadValues() for the step that Keep() kept;
/// LoadQuery(item).
template <typename Tr, typename Self>
__device__ __forceinline__ void Produce(const typename Tr::Params& p, const WorkList& work, const Shared<Tr>& shared,
                                        Self& self) {
  ItemWriter<Tr> writer(p, work, shared);
  ItemReader<Tr> reader(shared);
  WorkItem item;
  if (threadIdx.x == 0) {
    if (writer.IsLate()) writer.Take();
    writer.Publish();
  }
  __syncwarp();
  while (reader.Next(item)) {
    if (threadIdx.x == 0) writer.Take();
    const int last = StepsOf<Tr::KEYS>(item) - 1, publishing = max(last - Tr::STAGES, -1);
    // Keys of a step, then the query or the values of the step before: one copy of each in the code, because the
    // producer has few registers.
#pragma unroll 1
    for (int step = last; last >= 0 && step >= -1; --step) {
      const bool is_first = step == last;
      self.Keep();
      if (step >= 0) {
        self.Find(item, step);
        self.LoadKeys(item, step, is_first ? 0 : 1);
      }
      if (is_first) {
        self.LoadQuery(item);
      } else {
        self.LoadValues(item, step + 1);
      }
      // The next item is published once the rings are full: it costs no time then, and is there when consumers need it.
      if (step == publishing && threadIdx.x == 0) writer.Publish();
      __syncwarp();
    }
    if (last < 0) {
      if constexpr (Tr::CONVERTS) self.Finish();  // consumers get past the item before only with all of its tiles
      if (threadIdx.x == 0) writer.Publish();
    }
    __syncwarp();
  }
}

/// Issue of the boxes of a query tile, by one thread.
template <typename Tr>
struct QueryBoxes {
  const typename Tr::Params& p;
  const Boxes& boxes;
  const Shared<Tr> shared;
  hopper::RingPosition<1> at{};

  /// First head and token of the tile.
  __device__ __forceinline__ int Head(const WorkItem& item) const { return item.kv_head * int(p.group.divisor); }
  __device__ __forceinline__ int Token(const WorkItem& item) const {
    return item.qo_begin + int(p.group.Divide(item.row_begin));
  }
  __device__ __forceinline__ void Load(const WorkItem& item) { Load(Head(item), Token(item)); }
  __device__ __forceinline__ void Load(int head, int token) {
    if (!boxes.has_query) return;
    const uint32_t full = shared.QueryBarriers().BeginFill(at, Tr::Q_BYTES);
    at.Advance();
#pragma unroll
    for (int slab = 0; slab < Tr::QK_SLABS; ++slab) {
      ptx::LoadBox(shared.Query() + slab * (Tr::TILE * hopper::SLAB_ROW_BYTES), &boxes.q, full,
                   slab * SLAB_COLUMNS<typename Tr::T>, head, token);
    }
  }
};

/// Producer by TMA, run by ISSUERS warps that share the boxes of a step. One lane issues; lane i knows the row of the
/// i-th box of its warp.
template <typename Tr>
struct BoxProducer {
  using Params = typename Tr::Params;
  const Params& p;
  const Boxes& boxes;
  const Shared<Tr> shared;
  const int warp, lane;
  QueryBoxes<Tr> query;
  uint32_t count = 0;                  // tiles of values loaded
  int k_row = 0, v_row = 0, kept = 0;  // first rows of the box in the maps; kept: of the values of the step before

  __device__ __forceinline__ BoxProducer(const Params& p, const Boxes& boxes, const Shared<Tr>& shared)
      : p(p),
        boxes(boxes),
        shared(shared),
        warp(int(threadIdx.x) / 32),
        lane(int(threadIdx.x) % 32),
        query{p, boxes, shared} {}

  __device__ __forceinline__ void Find([[maybe_unused]] const WorkItem& item, [[maybe_unused]] int step) {
    if constexpr (Tr::PAGED) {
      const int token = item.kv_start + step * Tr::KEYS + (warp + lane * Tr::ISSUERS) * boxes.rows;
      const int at = p.page_size.Divide(min(token, item.kv_len - 1));
      const int page = p.kv_indices[item.kv_begin + at], entry = token - at * int(p.page_size.divisor);
      k_row = page * boxes.k_page_rows + entry;
      v_row = page * boxes.v_page_rows + entry;
    }
  }
  __device__ __forceinline__ void Keep() { kept = v_row; }

  __device__ __forceinline__ void LoadQuery(const WorkItem& item) {
    if (threadIdx.x == 0) query.Load(item);
    __syncwarp();
  }
  __device__ __forceinline__ void LoadKeys(const WorkItem& item, int step, int ahead) {
    const auto at = RingAt<Tr>(count + ahead);
    Load<Tr::QK_SLABS>(item, step, shared.KeyBarriers(), at, shared.Keys(at.stage), boxes.k, k_row);
  }
  __device__ __forceinline__ void LoadValues(const WorkItem& item, int step) {
    const auto at = RingAt<Tr>(count++);
    Load<Tr::VO_SLABS>(item, step, shared.ValueBarriers(), at, shared.Values(at.stage), boxes.v, kept);
  }

 private:
  static constexpr uint32_t SLAB_BYTES = Tr::KEYS * hopper::SLAB_ROW_BYTES;

  template <int SLABS>
  __device__ __forceinline__ void Load(const WorkItem& item, int step, const hopper::Ring<Tr::STAGES>& ring,
                                       const hopper::RingPosition<Tr::STAGES>& at, uint32_t to, const CUtensorMap& map,
                                       [[maybe_unused]] int row) {
    if constexpr (!Tr::PAGED) {
      if (lane == 0) {
        const uint32_t full = ring.BeginFill(at, SLABS * SLAB_BYTES);
        Issue<SLABS>(to, map, full, item.kv_head, item.kv_begin + item.kv_start + step * Tr::KEYS);
      }
    } else {
      const uint32_t box_bytes = uint32_t(boxes.rows) * hopper::SLAB_ROW_BYTES;
      const int own = Tr::KEYS / boxes.rows - warp;  // boxes from this warp's first on; it takes every ISSUERS-th
      if (lane == 0) {
        ring.BeginFill(at, uint32_t(max(0, (own + Tr::ISSUERS - 1) / Tr::ISSUERS)) * SLABS * box_bytes);
      }
#pragma unroll 1
      for (int box = warp, i = 0; box < warp + own; box += Tr::ISSUERS, ++i) {
        const int from = __shfl_sync(~0u, row, i);
        if (lane == 0) Issue<SLABS>(to + box * box_bytes, map, ring.Full(at.stage), item.kv_head, from);
      }
      __syncwarp();
    }
  }

  template <int SLABS>
  static __device__ __forceinline__ void Issue(uint32_t to, const CUtensorMap& map, uint32_t full, int head, int row) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      ptx::LoadBox(to + slab * SLAB_BYTES, &map, full, slab * SLAB_COLUMNS<typename Tr::T>, head, row);
    }
  }
};

/// Producer by cp.async, run by all threads of the warpgroup: 8 lanes copy 128 bytes of a row. Each lane looks up one row
/// of its warp's 32; the others get it by a shuffle.
template <typename Tr>
struct GatherProducer {
  using Params = typename Tr::Params;
  const Params& p;
  const RowStrides<Params>& strides;
  const Shared<Tr> shared;
  QueryBoxes<Tr> query;
  uint32_t count = 0;        // tiles of values loaded
  RowOffsets<Params> row{};  // offsets of key `threadIdx.x` of the step found last
  uint32_t kept = 0;         // offset of that key's value in the step before

  __device__ __forceinline__ GatherProducer(const Params& p, const Boxes& boxes, const RowStrides<Params>& strides,
                                            const Shared<Tr>& shared)
      : p(p), strides(strides), shared(shared), query{p, boxes, shared} {}

  __device__ __forceinline__ void Find(const WorkItem& item, int step) {
    const int token = item.kv_start + step * Tr::KEYS + int(threadIdx.x);
    row = RowOf<Tr::PAGED>(p, strides, item, token, PageOf<Tr::PAGED, true>(p, item, token));
  }
  __device__ __forceinline__ void Keep() { kept = row.v; }

  __device__ __forceinline__ void LoadQuery(const WorkItem& item) {
    if (threadIdx.x == 0) query.Load(item);
    __syncwarp();
  }
  __device__ __forceinline__ void LoadKeys(const WorkItem& item, int step, int ahead) {
    const auto at = RingAt<Tr>(count + ahead);
    Load<Tr::D_QK>(item, step, shared.KeyBarriers(), at, shared.Keys(at.stage), p.k, row.k);
  }
  __device__ __forceinline__ void LoadValues(const WorkItem& item, int step) {
    const auto at = RingAt<Tr>(count++);
    Load<Tr::D_VO>(item, step, shared.ValueBarriers(), at, shared.Values(at.stage), p.v, kept);
  }

 private:
  template <int COLUMNS>
  __device__ __forceinline__ void Load(const WorkItem& item, int step, const hopper::Ring<Tr::STAGES>& ring,
                                       const hopper::RingPosition<Tr::STAGES>& at, uint32_t to,
                                       const typename Params::DTypeKV* data, uint32_t offset) {
    const int lane = threadIdx.x % 32, first = int(threadIdx.x) / 32 * 32, chunk = lane % 8;
    const int room = item.kv_end - (item.kv_start + step * Tr::KEYS);  // rows that exist
    constexpr int SLAB = SLAB_COLUMNS<typename Tr::T>;
    ring.WaitEmpty(at);
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const int target = first + 4 * i + lane / 8;
      const char* from = RowAt<Params>(data, __shfl_sync(~0u, offset, 4 * i + lane / 8)) + 16 * chunk;
      if (Tr::KEYS % WARPGROUP != 0 && target >= Tr::KEYS) continue;
      const uint32_t line = to + hopper::Swizzle128(target * hopper::SLAB_ROW_BYTES + 16 * chunk);
#pragma unroll
      for (int column = 0; column < COLUMNS; column += SLAB) {
        if (COLUMNS - column < SLAB && column + 8 * chunk >= COLUMNS) break;
        ptx::CopyAsync16(line + column / SLAB * (Tr::KEYS * hopper::SLAB_ROW_BYTES), from + 2 * column, target < room);
      }
    }
    ptx::MbarrierArriveCopies(ring.Full(at.stage));
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
