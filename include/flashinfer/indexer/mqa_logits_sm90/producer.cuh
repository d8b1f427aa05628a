// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90: loads. One warp copies keys and scales by TMA, a box being a page or 64 keys of one; three warps
// copy queries and weights of a request with cp.async while the block still computes the request before.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "../../ptx/elect.cuh"
#include "../../ptx/tma.cuh"
#include "../sum_heads.cuh"
#include "segments.cuh"

namespace flashinfer {
namespace indexer {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Page ids of a segment, 32 at a time, and the next 32 on their way. Entries behind the request are not read.
class PageIds {
 public:
  __device__ __forceinline__ PageIds(const MqaLogitsParams& p, const Segment& segment)
      : table_(p.block_tables + segment.request * p.table_stride),
        count_((segment.end + p.block_size - 1) / p.block_size),
        base_(segment.begin / p.block_size) {
    held_ = Load(base_), ahead_ = Load(base_ + 32);
  }

  /// Page `entry` of the request. Entries ascend from call to call; called by all lanes.
  __device__ __forceinline__ int Of(int entry) {
    while (entry >= base_ + 32) {
      base_ += 32;
      held_ = ahead_, ahead_ = Load(base_ + 32);
    }
    return __shfl_sync(~0u, held_, entry - base_);
  }

 private:
  __device__ __forceinline__ int Load(int first) const {
    const int entry = first + int(threadIdx.x) % 32;
    return entry < count_ ? table_[entry] : -1;
  }

  const int32_t* table_;
  const int count_;
  int base_, held_, ahead_;
};

/// Load keys and scales of all tiles of the block: one warp. A page id outside of the cache gives zeros.
template <typename Shape>
__device__ __forceinline__ void ProduceKeys(const MqaLogitsParams& p, const Shared<Shape>& shared, const void* values,
                                            const void* scales) {
  const auto ring = shared.Keys();
  const int box = min(p.block_size, KEYS);
  hopper::RingPosition<Shape::STAGES> at;
  Segments segments(p);
  Segment segment;
  while (segments.Next(segment)) {
    PageIds pages(p, segment);
    for (int key = segment.begin; key < segment.end; key += KEYS) {
      const int boxes = min((segment.end - key + box - 1) / box, KEYS / box);
      const int entry = key / p.block_size, row = key % p.block_size;
      const int first = pages.Of(entry), second = boxes > 1 ? pages.Of(entry + 1) : 0;
      if (ptx::ElectLane()) {
        const uint32_t full = ring.BeginFill(at, uint32_t(boxes) * box * (Shape::DIM + uint32_t(sizeof(float))));
        for (int i = 0; i < boxes; ++i) {
          const int page = i == 0 ? first : second;
          const uint32_t tile = shared.Tile(at.stage) + i * box * hopper::SLAB_ROW_BYTES;
#pragma unroll
          for (int slab = 0; slab < Shape::SLABS; ++slab) {
            ptx::LoadBox(tile + slab * KEYS * hopper::SLAB_ROW_BYTES, values, full, slab * hopper::SLAB_ROW_BYTES, row,
                         page);
          }
          ptx::LoadBox(shared.Scales(at.stage) + i * box * uint32_t(sizeof(float)), scales, full, row, page, 0);
        }
      }
      __syncwarp();
      at.Advance();
    }
  }
}

/// Load queries and weights of all requests of the block: LOADER_WARPS warps.
template <typename Shape>
__device__ __forceinline__ void ProduceQueries(const MqaLogitsParams& p, const Shared<Shape>& shared) {
  constexpr int CHUNKS = Shape::DIM / 16, LOADERS = LOADER_WARPS * 32;
  const int thread = int(threadIdx.x) % WARPGROUP - (WARPGROUP - LOADERS);
  const auto ring = shared.Queries();
  hopper::RingPosition<QUERY_STAGES> at;
  Segments segments(p);
  Segment segment;
  while (segments.Next(segment)) {
    ring.WaitEmpty(at);
    const auto* q = reinterpret_cast<const char*>(p.q) + segment.request * p.q_stride_b;
    for (int i = thread; i < Shape::COLUMNS * CHUNKS; i += LOADERS) {
      const int column = i / CHUNKS, chunk = i % CHUNKS, row = RowOfColumn(column);
      const char* from = q + row / Shape::HEADS * p.q_stride_t + row % Shape::HEADS * p.q_stride_h + chunk * 16;
      const uint32_t to = shared.Query(at.stage) + chunk / 8 * Shape::QUERY_SLAB_BYTES +
                          hopper::Swizzle128(column * hopper::SLAB_ROW_BYTES + chunk % 8 * 16);
      ptx::CopyAsync16(to, from, true);
    }
    for (int i = thread; i < Shape::COLUMNS; i += LOADERS) {
      const int64_t row = int64_t(segment.request) * Shape::NEXT_N + i / Shape::HEADS;
      ptx::CopyAsync4(shared.Weights(at.stage) + i * 4,
                      p.weights + row * p.weights_stride + i % Shape::HEADS * p.weights_stride_h);
    }
    ptx::MbarrierArriveCopies(ring.Full(at.stage));
    at.Advance();
  }
}

#endif

}  // namespace sm90
}  // namespace indexer
}  // namespace flashinfer
