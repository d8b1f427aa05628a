// SPDX-License-Identifier: Apache-2.0
// Producer of the Hopper prefill kernel for e4m3 queries, keys and values that TMA can copy. Each warp has 32 keys of a
// step. Its keys go to their ring, its values to one of two landing places of its own, both in boxes of at most 32 rows,
// each issued by one lane. Values are transposed from there to their ring one step later; how is told in
// producer_transpose.cuh. No warp waits for another one.
//
// A warp takes 7 instructions for 16 columns: addresses in the landing place differ by an exclusive or of the chunk, those
// in the ring by a constant.
#pragma once
#include "../../ptx/mma.cuh"
#include "../../ptx/stmatrix.cuh"
#include "shape_fp8.cuh"
#include "producer.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Tr>
struct BoxTransposeProducer {
  using Params = typename Tr::Params;
  static constexpr int ROWS = 32, CHUNKS = Tr::D_VO / 16, BATCH = CHUNKS % 4 == 0 ? 4 : 2;
  static constexpr uint32_t SLAB_BYTES = Tr::KEYS * hopper::SLAB_ROW_BYTES, PART = ROWS * hopper::SLAB_ROW_BYTES;
  static_assert(Tr::KEYS == 4 * ROWS && Tr::LANDING_SLABS == 1 && CHUNKS % BATCH == 0, "parts of the warps");

  const Params& p;
  const Boxes& boxes;
  const Shared<Tr> shared;
  const int warp, lane;
  const uint32_t from,
      to;  // first chunk of the lane's row in the first landing place, and of what it stores in the ring
  QueryBoxes<Tr> query;
  uint32_t k_count = 0, v_count = 0;  // tiles of keys loaded (and values landed), tiles of values transposed
  int k_row = 0, v_row = 0;           // first rows in the maps of the lane's box

  __device__ __forceinline__ BoxTransposeProducer(const Params& p, const Boxes& boxes, const Shared<Tr>& shared)
      : p(p),
        boxes(boxes),
        shared(shared),
        warp(int(threadIdx.x) / 32),
        lane(int(threadIdx.x) % 32),
        from(shared.Landing(0) + hopper::Swizzle128((warp * ROWS + lane) * hopper::SLAB_ROW_BYTES)),
        to(shared.Values(0) +
           hopper::Swizzle128((lane % 8 + lane / 16 * 8) * hopper::SLAB_ROW_BYTES + warp * ROWS + lane / 8 % 2 * 16)),
        query{p, boxes, shared} {}

  __device__ __forceinline__ void Find(const WorkItem& item, int step) {
    int token = item.kv_start + step * Tr::KEYS + warp * ROWS + lane * boxes.rows;
    if constexpr (Tr::PAGED) {
      token = min(token, (item.kv_len - 1) & -boxes.rows);  // boxes behind the last key repeat its box
      const int at = p.page_size.Divide(token), entry = token - at * int(p.page_size.divisor);
      const int page = p.kv_indices[item.kv_begin + at];
      k_row = page * boxes.k_page_rows + entry;
      v_row = page * boxes.v_page_rows + entry;
    } else {
      k_row = v_row = item.kv_begin + token;
    }
  }
  __device__ __forceinline__ void Keep() {}

  __device__ __forceinline__ void LoadQuery(const WorkItem& item) {
    if (threadIdx.x == 0) query.Load(item);
    __syncwarp();
  }

  /// Load keys and values of a step. Values come first: the warp has read what was in their landing place.
  __device__ __forceinline__ void LoadKeys(const WorkItem& item, int, int) {
    const auto at = TileAt<Tr::KEY_STAGES>(k_count);
    const int slot = int(k_count % Tr::LANDINGS);
    const uint32_t landed = shared.LandingBarrier(warp, slot);
    const uint32_t box = uint32_t(lane * boxes.rows) * hopper::SLAB_ROW_BYTES + warp * PART;
    const bool has_box = lane * boxes.rows < ROWS;
    if (lane == 0) ptx::MbarrierArriveExpect(landed, PART);
    __syncwarp();
    if (has_box) ptx::LoadBox(shared.Landing(slot) + box, &boxes.v, landed, 0, item.kv_head, v_row);
    if (lane == 0) shared.KeyBarriers().BeginFill(at, Tr::QK_SLABS * PART);
    __syncwarp();
    if (has_box) {
#pragma unroll
      for (int slab = 0; slab < Tr::QK_SLABS; ++slab) {
        ptx::LoadBox(shared.Keys(at.stage) + slab * SLAB_BYTES + box, &boxes.k, shared.KeyBarriers().Full(at.stage),
                     slab * SLAB_COLUMNS<typename Tr::T>, item.kv_head, k_row);
      }
    }
    __syncwarp();
    ++k_count;
  }

  /// Transpose the values of a step, after the keys of the next one (if there is one) were requested.
  __device__ __forceinline__ void LoadValues(const WorkItem& item, int step) {
    const auto at = RingAt<Tr>(v_count);
    const auto landed = TileAt<Tr::LANDINGS>(v_count);
    const uint32_t landing = from + landed.stage * Tr::LANDING_BYTES;
    ptx::MbarrierWait(shared.LandingBarrier(warp, landed.stage), landed.parity);
    const int room = item.kv_end - (item.kv_start + step * Tr::KEYS) - warp * ROWS;  // rows of the warp that exist
    if (room < ROWS) Clear(landing, lane >= room);
    shared.ValueBarriers().WaitEmpty(at);
    Transpose(landing, to + at.stage * Tr::V_BYTES);
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(shared.ValueBarriers().Full(at.stage));
    ++v_count;
  }

 private:
  /// Zero the lane's row: rows behind the last key are those of another request or were never written, and a weight of
  /// 0 times NaN is NaN.
  __device__ __forceinline__ void Clear(uint32_t landing, bool is_missing) const {
    if (is_missing) {
#pragma unroll 1
      for (int i = 0; i < CHUNKS; ++i) ptx::StoreShared16(landing ^ (16 * i), uint4{});
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Transpose(uint32_t landing, uint32_t tile) const {
#pragma unroll
    for (int first = 0; first < CHUNKS; first += BATCH) {
      uint32_t x[BATCH][4];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) ptx::LdMatrixTrans(x[i], landing ^ (16 * (first + i)));
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        ptx::StoreMatrix4(tile + (first + i) * (16 * hopper::SLAB_ROW_BYTES), __byte_perm(x[i][0], x[i][1], 0x6420),
                          __byte_perm(x[i][2], x[i][3], 0x6420), __byte_perm(x[i][0], x[i][1], 0x7531),
                          __byte_perm(x[i][2], x[i][3], 0x7531));
      }
    }
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
