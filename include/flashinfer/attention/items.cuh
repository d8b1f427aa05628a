// SPDX-License-Identifier: Apache-2.0
// Where a block finds what it has to do.
#pragma once
#include "../utils.cuh"
#include "entry.h"
#include "variants.h"

namespace flashinfer {
namespace attention {

/// An item of one request cut evenly (WorkList::uniform).
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem UniformItem(const Params& p, const WorkList& work, int tile, int chunk, int head) {
  WorkItem item;
  item.request = item.qo_begin = item.kv_begin = 0;
  item.next = -1;
  item.qo_len = p.qo_len;
  item.kv_len = p.kv_len;
  item.kv_head = head;
  item.row_begin = tile * TILE;
  item.is_first = chunk == 0;
  item.merge = tile;
  item.slot = work.uniform.chunks > 1 ? (tile * work.uniform.chunks + chunk) * p.num_kv_heads + head : -1;
  // Keys that some row of the tile sees.
  const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
  const int first = p.group.Divide(item.row_begin);
  const int last = min(int(p.group.Divide(item.row_begin + TILE - 1)), item.qo_len - 1);
  item.kv_start = max(chunk * work.uniform.chunk_size, mask.First(first) / GRANULE * GRANULE);
  item.kv_end = min(min(p.kv_len, (chunk + 1) * work.uniform.chunk_size), mask.End(last));
  return item;
}

/// Item `index` of such a list.
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem UniformItem(const Params& p, const WorkList& work, int index) {
  const int unit = p.kv_heads.Divide(index), chunks = work.uniform.chunks, tile = unit / chunks;
  return UniformItem<TILE>(p, work, work.uniform.tiles - 1 - tile, unit - tile * chunks, index - unit * p.num_kv_heads);
}

/// Item i of a list for head h, with i * heads + h = index; with its length where only the device knows it.
template <typename Params>
__device__ __forceinline__ WorkItem ListItem(const Params& p, const WorkList& work, int index) {
  WorkItem item;
  const int unit = p.kv_heads.Divide(index), head = index - unit * p.num_kv_heads;
  const int4* from = reinterpret_cast<const int4*>(work.items + unit);
  int4* to = reinterpret_cast<int4*>(&item);
#pragma unroll
  for (int i = 0; i < int(sizeof(WorkItem) / sizeof(int4)); ++i) to[i] = __ldg(from + i);
  if (item.kv_len < 0) {
    item.kv_len = int(p.get_kv_len(item.request));
    item.kv_end = min(item.kv_end, item.kv_len);
  }
  item.kv_head = head;
  if (item.slot >= 0) item.slot += head;
  if (item.next >= 0) item.next = item.next * p.num_kv_heads + head;
  return item;
}

/// An item of requests that are cut alike (WorkList::regular).
template <typename Params>
__device__ __forceinline__ WorkItem RegularItem(const Params& p, const WorkList& work, int request, int chunk,
                                                int head) {
  WorkItem item;
  const auto& regular = work.regular;
  const int chunks = regular.chunks.divisor;
  item.request = item.merge = request;
  item.next = -1;
  item.qo_begin = request * regular.qo_len;
  item.qo_len = regular.qo_len;
  item.kv_begin = request * regular.pages;
  item.kv_len = regular.kv_len;
  item.kv_head = head;
  item.row_begin = 0;
  item.is_first = chunk == 0;
  item.slot = chunks > 1 ? (request * chunks + chunk) * p.num_kv_heads + head : -1;
  item.kv_start = chunk * regular.chunk_size;
  item.kv_end = min(item.kv_start + regular.chunk_size, regular.kv_len);
  return item;
}

/// The item of block `block` where each has one that follows from its number. Chunks of a tile and head follow each other, so
/// that they can be a cluster.
template <int TILE, bool CAN_BE_UNIFORM, typename Params>
__device__ __forceinline__ WorkItem ComputedItem(const Params& p, const WorkList& work, int block) {
  if constexpr (CAN_BE_UNIFORM) {
    if (work.items == nullptr) {
      const int chunks = work.uniform.chunks, unit = block / chunks, tile = p.kv_heads.Divide(unit);
      return UniformItem<TILE>(p, work, tile, block - unit * chunks, unit - tile * p.num_kv_heads);
    }
  }
  const int chunks = work.regular.chunks.divisor;
  const int unit = work.regular.chunks.Divide(block), request = p.kv_heads.Divide(unit);
  return RegularItem(p, work, request, block - unit * chunks, unit - request * p.num_kv_heads);
}

/// The first item of block `block`, in any kind of list; `request` is negative if there is none. No load waits for another.
/// CAN_BE_UNIFORM: false leaves the code of such lists out.
template <int TILE, bool CAN_BE_UNIFORM = true, typename Params>
__device__ __forceinline__ WorkItem FirstItem(const Params& p, const WorkList& work, int block) {
  if constexpr (CAN_BE_UNIFORM) {
    if (work.items == nullptr) return UniformItem<TILE>(p, work, block);
  }
  WorkItem item = ListItem(p, work, block);
  if (!work.has_shares && block >= *work.num_items * p.num_kv_heads) item.request = -1;
  return item;
}

}  // namespace attention
}  // namespace flashinfer
