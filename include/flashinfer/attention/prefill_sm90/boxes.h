// SPDX-License-Identifier: Apache-2.0
// Tensor maps of the Hopper prefill kernel, found on the host for each launch. Queries are seen as [token, head, column]
// and copied in boxes of the heads of a group and the tokens of a tile. Keys and values are seen as [row, head, column]:
// ragged ones in boxes of a step of tokens, pages in boxes of at most a page. Where a page has a whole number of rows,
// its first row is page * page_rows.
#pragma once
#include <cstdint>

#include "../../hopper/tensor_map_cache.h"
#include "../common/params.h"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

struct Boxes {
  CUtensorMap q, k, v;
  int32_t rows;                      // rows of a box of keys or values
  int32_t k_page_rows, v_page_rows;  // rows between pages
  bool has_query;                    // false: consumers copy the queries row by row
};

/// Columns of a slab: 128 bytes.
template <typename T>
inline constexpr int SLAB_COLUMNS = 128 / int(sizeof(T));
constexpr int SMALLEST_BOX = 8;  // rows; smaller boxes are issued more slowly than they are used (H200)

/// Tensor [rows, heads, columns] and a box of `box_rows` rows of `box_heads` heads of a slab.
template <typename T>
inline hopper::TensorBox BoxOf(const T* data, int64_t columns, int64_t heads, int64_t stride_h, int64_t rows,
                               int64_t stride_n, int box_heads, int box_rows) {
  hopper::TensorBox box;
  box.data = data;
  box.element_bytes = int(sizeof(T));
  box.size[0] = uint64_t(columns), box.size[1] = uint64_t(heads), box.size[2] = uint64_t(rows);
  box.stride_bytes[0] = uint64_t(stride_h) * sizeof(T), box.stride_bytes[1] = uint64_t(stride_n) * sizeof(T);
  box.box[0] = SLAB_COLUMNS<T>, box.box[1] = uint32_t(box_heads), box.box[2] = uint32_t(box_rows);
  return box;
}

/// Return true if TMA can copy such boxes. A dimension that repeats one row (stride 0) has no map.
inline bool Encode(CUtensorMap* map, const hopper::TensorBox& box) {
  for (int i = 0; i < 2; ++i) {
    if (box.size[i + 1] > 1 && box.stride_bytes[i] == 0) return false;
  }
  return hopper::TensorBoxFault(box) == nullptr && hopper::FindTensorMap(map, box) == cudaSuccess;
}

/// Encode the map of the queries for tiles of `tile` rows. Returns false if a tile does not consist of whole tokens.
template <typename Params>
bool EncodeQueries(Boxes* boxes, const Params& p, int tile) {
  const int group = int(p.group.divisor);
  if (tile % group != 0) return false;
  return Encode(&boxes->q, BoxOf(p.q, Params::HEAD_DIM_QK, p.num_qo_heads, p.q_stride_h, p.qo_len, p.q_stride_n, group,
                                 tile / group));
}

/// Encode the maps of ragged keys and values for steps of `keys` tokens.
template <typename Params>
bool EncodeRows(Boxes* boxes, const Params& p, int keys) {
  boxes->rows = keys;
  const int heads = p.num_kv_heads;
  return Encode(&boxes->k, BoxOf(p.k, Params::HEAD_DIM_QK, heads, p.k_stride_h, p.kv_len, p.k_stride_n, 1, keys)) &&
         Encode(&boxes->v, BoxOf(p.v, Params::HEAD_DIM_VO, heads, p.v_stride_h, p.kv_len, p.v_stride_n, 1, keys));
}

/// Return the rows of a box: the largest power of two that divides the page, a step of `keys` keys and the unit at
/// which work items start.
inline int BoxRows(int page_size, int keys) {
  int rows = 64;
  while (page_size % rows != 0 || keys % rows != 0) rows /= 2;
  static_assert(KV_UNIT % 64 == 0, "items start at whole boxes");
  return rows;
}

/// Encode the maps of pages. Every box lies within a page that exists, so the maps need no bound.
template <typename Params>
bool EncodePages(Boxes* boxes, const Params& p, int keys) {
  constexpr int64_t MANY_ROWS = INT32_MAX;
  boxes->rows = BoxRows(int(p.page_size.divisor), keys);
  if (boxes->rows < SMALLEST_BOX) return false;
  auto encode = [&](CUtensorMap* map, int32_t* page_rows, const auto* data, int64_t columns, int64_t page, int64_t n,
                    int64_t h) {
    // A cache of one page has stride 0 between pages, and entries of one row stride 0 between rows.
    if (n == 0 || page % n != 0) return false;
    *page_rows = int32_t(page / n);
    return Encode(map, BoxOf(data, columns, p.num_kv_heads, h, MANY_ROWS, n, 1, boxes->rows));
  };
  return encode(&boxes->k, &boxes->k_page_rows, p.k, Params::HEAD_DIM_QK, p.k_stride_page, p.k_stride_n,
                p.k_stride_h) &&
         encode(&boxes->v, &boxes->v_page_rows, p.v, Params::HEAD_DIM_VO, p.v_stride_page, p.v_stride_n, p.v_stride_h);
}

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
