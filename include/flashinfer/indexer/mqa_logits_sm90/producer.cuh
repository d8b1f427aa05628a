// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90: loads. One warp copies keys and scales by TMA, a box being a page or 64 keys of one; three warps
// copy queries and weights of a request with cp.async while the block still computes the request before.
#pragma once
#include "../../ptx/cp_async.cuh"
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
  __device__ __forceinline__ PageIds(const MqaLogitsParams& p, const Segment& segment, int shift)
      : table_(p.block_tables + segment.request * p.table_stride),
        count_((segment.end + p.block_size - 1) >> shift),
        base_(segment.begin >> shift) {
    held_ = Load(base_), ahead_ = Load(base_ + 32);
  }

  /// Move on to the 32 entries that `entry` is among. Entries ascend from call to call; called by all lanes.
  __device__ __forceinline__ void MoveTo(int entry) {
    while (entry >= base_ + 32) {
      base_ += 32;
      held_ = ahead_, ahead_ = Load(base_ + 32);
    }
  }

  /// Page `entry` of the request, each lane its own, among the 32 entries. Called by all lanes.
  __device__ __forceinline__ int Of(int entry) const { return __shfl_sync(~0u, held_, (entry - base_) & 31); }

 private:
  __device__ __forceinline__ int Load(int first) const {
    const int entry = first + int(threadIdx.x) % 32;
    return entry < count_ ? table_[entry] : -1;
  }

  const int32_t* table_;
  const int count_;
  int base_, held_, ahead_;
};

/// Load a tile of keys and scales, by one thread: `boxes` boxes of `box` keys from key `row` of page `first` and, if it
/// has a second box, from page `second`. A page id outside of the cache gives zeros.
template <typename Shape>
__device__ __forceinline__ void LoadTile(const Shared<Shape>& shared, const hopper::RingPosition<Shape::STAGES>& at,
                                         const void* values, const void* scales, uint64_t policy, int boxes, int box,
                                         int row, int first, int second) {
  const uint32_t full = shared.Keys().BeginFill(at, uint32_t(boxes) * box * (Shape::DIM + uint32_t(sizeof(float))));
  for (int i = 0; i < boxes; ++i) {
    const int page = i == 0 ? first : second;
    const uint32_t tile = shared.Tile(at.stage) + i * box * hopper::SLAB_ROW_BYTES;
#pragma unroll
    for (int slab = 0; slab < Shape::SLABS; ++slab) {
      ptx::LoadBox(tile + slab * KEYS * hopper::SLAB_ROW_BYTES, values, full, slab * hopper::SLAB_ROW_BYTES, row, page,
                   policy);
    }
    ptx::LoadBox(shared.Scales(at.stage) + i * box * uint32_t(sizeof(float)), scales, full, row, page, 0, policy);
  }
}

/// Load keys and scales of all tiles of the block: one warp, whose first FILL_LANES lanes load a tile each at a time. What
/// a tile costs besides the copies (ids, bounds, the wait for its stage) would otherwise take longer than its bytes.
template <typename Shape>
__device__ __forceinline__ void ProduceKeys(const MqaLogitsParams& p, const Shared<Shape>& shared, const void* values,
                                            const void* scales) {
  const int lane = int(threadIdx.x) % 32, box = min(p.block_size, KEYS);
  const int shift = 31 - __clz(p.block_size), mask = p.block_size - 1;  // a power of two
  const uint64_t policy = ptx::PolicyEvictFirst();  // no line that is read is read again; dirty ones stay longer
  hopper::RingPosition<Shape::STAGES> at;
  for (int i = 0; i < lane % FILL_LANES; ++i) at.Advance();
  Segments segments(p);
  Segment segment;
  while (segments.Next(segment)) {
    PageIds pages(p, segment, shift);
    for (int begin = segment.begin; begin < segment.end; begin += FILL_LANES * KEYS) {
      const int key = begin + lane % FILL_LANES * KEYS, entry = key >> shift;
      pages.MoveTo(begin >> shift);
      const int first = pages.Of(entry), second = pages.Of(entry + 1);
      if (lane < FILL_LANES && key < segment.end) {
        const int boxes = box == KEYS || segment.end - key <= box ? 1 : KEYS / MIN_BLOCK;
        LoadTile(shared, at, values, scales, policy, boxes, box, key & mask, first, second);
      }
      __syncwarp();
      const int loaded = min((segment.end - begin + KEYS - 1) / KEYS, FILL_LANES);
      at.stage += loaded;
      if (at.stage >= Shape::STAGES) at.stage -= Shape::STAGES, at.parity ^= 1;
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
