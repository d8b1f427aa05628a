// SPDX-License-Identifier: Apache-2.0
// Decode a block index into its WorkItem.
#pragma once
#include "../../utils.cuh"
#include "backend_interface.h"
#include "../variants.h"

namespace flashinfer {
namespace attention {

/// Item of one request that is split evenly (WorkList::single_request).
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem SingleRequestItem(const Params& p, const WorkList& work, int tile, int chunk,
                                                      int head) {
  WorkItem item;
  item.request = item.qo_begin = item.kv_begin = 0;
  item.next = -1;
  item.qo_len = p.qo_len;
  item.kv_len = p.kv_len;
  item.kv_head = head;
  item.row_begin = tile * TILE;
  item.is_first = chunk == 0;
  item.merge = tile;
  item.slot = work.single_request.chunks > 1 ? (tile * work.single_request.chunks + chunk) * p.num_kv_heads + head : -1;
  // Range of keys that at least one row of the tile sees.
  const MaskOf<Params> mask(p, item.qo_len, item.kv_len);
  const int first = p.group.Divide(item.row_begin);
  const int last = min(int(p.group.Divide(item.row_begin + TILE - 1)), item.qo_len - 1);
  item.kv_start = max(chunk * work.single_request.chunk_size, mask.First(first) / KV_UNIT * KV_UNIT);
  item.kv_end = min(min(p.kv_len, (chunk + 1) * work.single_request.chunk_size), mask.End(last));
  return item;
}

/// Item `index` of a single-request list.
template <int TILE, typename Params>
__device__ __forceinline__ WorkItem SingleRequestItem(const Params& p, const WorkList& work, int index) {
  const int unit = p.kv_heads.Divide(index), chunks = work.single_request.chunks, tile = unit / chunks;
  return SingleRequestItem<TILE>(p, work, work.single_request.tiles - 1 - tile, unit - tile * chunks,
                                 index - unit * p.num_kv_heads);
}

/// Load item i of a list for head h, with i * heads + h = index; fills in the length where only the device knows it.
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
  if constexpr (Params::SHARED_KV) {
    if (work.kv_ends != nullptr) item.kv_end = min(item.kv_end, max(__ldg(work.kv_ends + unit), item.kv_start));
  }
  item.kv_head = head;
  if (item.slot >= 0) item.slot += head;
  if (item.next >= 0) item.next = item.next * p.num_kv_heads + head;
  return item;
}

/// Item of a batch of equal requests (WorkList::equal_requests).
template <typename Params>
__device__ __forceinline__ WorkItem EqualRequestItem(const Params& p, const WorkList& work, int request, int chunk,
                                                     int head) {
  WorkItem item;
  const auto& regular = work.equal_requests;
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

/// Compute the item of block `block` where it follows from the block index. The chunks of a tile and head are adjacent,
/// so that they can form a cluster.
template <int TILE, bool CAN_BE_SINGLE, typename Params>
__device__ __forceinline__ WorkItem ComputedItem(const Params& p, const WorkList& work, int block) {
  if constexpr (CAN_BE_SINGLE) {
    if (work.items == nullptr) {
      const int chunks = work.single_request.chunks, unit = block / chunks, tile = p.kv_heads.Divide(unit);
      return SingleRequestItem<TILE>(p, work, tile, block - unit * chunks, unit - tile * p.num_kv_heads);
    }
  }
  const int chunks = work.equal_requests.chunks.divisor;
  const int unit = work.equal_requests.chunks.Divide(block), request = p.kv_heads.Divide(unit);
  return EqualRequestItem(p, work, request, block - unit * chunks, unit - request * p.num_kv_heads);
}

/// First item of block `block` in any kind of list; `request` is negative if there is none. No load depends on another
/// load. CAN_BE_SINGLE: false removes the code of single-request lists.
template <int TILE, bool CAN_BE_SINGLE = true, typename Params>
__device__ __forceinline__ WorkItem FirstItem(const Params& p, const WorkList& work, int block) {
  if constexpr (CAN_BE_SINGLE) {
    if (work.items == nullptr) return SingleRequestItem<TILE>(p, work, block);
  }
  WorkItem item = ListItem(p, work, block);
  if (!work.has_shares && block >= *work.num_items * p.num_kv_heads) item.request = -1;
  return item;
}

}  // namespace attention
}  // namespace flashinfer
