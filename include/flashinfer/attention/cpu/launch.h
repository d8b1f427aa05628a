// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: the functions of common/backend_interface.h for host threads. A thread takes one block of the
// work list at a time (tile.h). Everything is computed in float. Results do not depend on the assignment of blocks to
// threads.
//   test  pytest tests/attention/test_native.py      bench  python benchmarks/bench_decode.py
#pragma once
#include "tile.h"

namespace flashinfer {
namespace attention {

/// Call body(block) for each block, in the order of the list, on whichever thread is free; make() is called once per
/// thread.
template <typename Make, typename Body>
inline void ForEachBlock(int32_t blocks, const Make& make, const Body& body) {
#pragma omp parallel if (blocks > 1)
  {
    auto runner = make();
#pragma omp for schedule(dynamic, 1) nowait
    for (int32_t block = 0; block < blocks; ++block) body(runner, block);
  }
}

template <typename Params>
WorkItem SingleRequestItem(const Params& params, const WorkList& work, int32_t tile_rows, int32_t tile, int32_t chunk) {
  WorkItem item{};
  item.qo_len = params.qo_len;
  item.kv_len = params.kv_len;
  item.row_begin = tile * tile_rows;
  item.kv_start = chunk * work.single_request.chunk_size;
  item.kv_end = std::min(item.kv_start + work.single_request.chunk_size, params.kv_len);
  item.is_first = chunk == 0;
  return item;
}

template <typename Runner, typename Params>
FLASHINFER_OUTLINED void RunWork(const Params& params, const WorkList& work, int32_t tile, bool is_paged) {
  const int32_t heads = params.num_kv_heads;
  int32_t blocks = work.blocks;
  if (work.items != nullptr) blocks = work.has_shares ? *work.num_items : std::min(blocks, *work.num_items * heads);
  auto make = [&] { return Runner(params, work, tile, is_paged); };
  ForEachBlock(blocks, make, [&](Runner& runner, int32_t block) {
    if (work.items == nullptr) {
      const int32_t head = block % heads, chunk = block / heads % work.single_request.chunks;
      const int32_t row_tile = work.single_request.tiles - 1 - block / heads / work.single_request.chunks;
      runner.Run(SingleRequestItem(params, work, tile, row_tile, chunk), head,
                 work.single_request.chunks > 1 ? block : -1);
    } else {
      const int32_t head = block % heads;
      for (int32_t i = block / heads; i >= 0; i = work.items[i].next) {
        WorkItem item = work.items[i];
        if constexpr (Params::SHARED_KV) {
          if (work.kv_ends != nullptr) item.kv_end = std::min(item.kv_end, std::max(work.kv_ends[i], item.kv_start));
        }
        runner.Run(item, head, item.slot < 0 ? -1 : item.slot + head);
      }
    }
  });
}

/// Merge the slots of one tile and head.
template <typename Params, typename Variant>
FLASHINFER_OUTLINED void MergeTile(const Params& params, const WorkList& work, int32_t tile, const MergeItem& item,
                                   int32_t kv_head, int32_t first_slot) {
  constexpr int D = Params::HEAD_DIM_VO;
  const int32_t group = int32_t(params.group.divisor);
  const int32_t rows = std::min(tile, item.qo_len * group - item.row_begin);
  float sum[D];
  for (int32_t r = 0; r < rows; ++r) {
    float largest = -math::inf, weights = 0.f;
    for (int32_t i = 0; i < item.count; ++i) {
      largest = std::max(largest, work.partial_lse[int64_t(first_slot + i * item.step) * tile + r]);
    }
    std::fill_n(sum, D, 0.f);
    for (int32_t i = 0; i < item.count && largest != -math::inf; ++i) {
      const int64_t at = int64_t(first_slot + i * item.step) * tile + r;
      const float weight = Variant::use_softmax ? std::exp2(work.partial_lse[at] - largest) : 1.f;
      weights += weight;
      for (int d = 0; d < D; ++d) sum[d] += weight * work.partial_o[at * D + d];
    }
    if (Variant::use_softmax && weights > 0.f) {
      for (int d = 0; d < D; ++d) sum[d] /= weights;
    }
    const int32_t row = item.row_begin + r, token = row / group;
    const float score = Variant::use_softmax ? largest + std::log2(weights) : 0.f;
    WriteRow(params, item.qo_begin + token, kv_head * group + row - token * group, sum,
             largest == -math::inf ? -math::inf : score);
  }
}

template <typename Params, typename Variant>
FLASHINFER_OUTLINED void RunMerges(const Params& params, const WorkList& work, int32_t tile) {
  const int32_t heads = params.num_kv_heads;
  if (work.items == nullptr) {
    for (int32_t block = 0; block < work.merge_blocks; ++block) {
      const int32_t order = block / heads, head = block % heads, chunks = work.single_request.chunks;
      MergeItem item{};
      item.qo_len = params.qo_len;
      item.row_begin = (work.single_request.tiles - 1 - order) * tile;
      item.count = chunks;
      item.step = heads;
      MergeTile<Params, Variant>(params, work, tile, item, head, order * chunks * heads + head);
    }
    return;
  }
  for (int32_t i = 0; i < *work.num_merges; ++i) {
    const MergeItem& item = work.merges[i];
    for (int32_t head = 0; head < heads; ++head) {
      MergeTile<Params, Variant>(params, work, tile, item, head, item.first_slot + head);
    }
  }
}

/// Number of blocks. Decoding gets several per thread, so that an interrupted thread does not delay all others.
template <typename Params, int TILE>
int MaxActiveBlocks() {
#if defined(_OPENMP)
  return omp_get_max_threads() * (TILE == DECODE_TILE && omp_get_max_threads() > 1 ? 4 : 1);
#else
  return 1;
#endif
}

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool, Stream) {
  using V = Variant<ALL_MASKED>;
  ChooseProducts<Params, OperandsOf<Params, V>>([&](auto* products) {
    using Products = std::remove_pointer_t<decltype(products)>;
    RunWork<TileRunner<Params, V, Products>>(params, work, TILE, PAGED);
  });
  return 0;
}

template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool, Stream) {
  RunMerges<Params, Variant<false>>(params, work, TILE);
  return 0;
}

}  // namespace attention
}  // namespace flashinfer
