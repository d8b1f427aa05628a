// SPDX-License-Identifier: Apache-2.0
// Producer of the Hopper prefill kernel for e4m3 queries, keys and values where TMA cannot copy rows or a step has 64 keys
// (otherwise: producer_transpose_boxes.cuh). All threads of the warpgroup copy keys to their ring, and values to one of
// two landing places, by cp.async from any rows. A tile of values is transposed from there to the ring of values one step
// later, when its place in the ring is free.
//
// A warp copies and transposes 32 keys (and a half of the columns where a step has 64 keys), so a barrier of the warp
// orders both. Of 16 columns it loads four 8 x 8 matrices of pairs of columns, transposed: lane l gets columns
// 2 (l / 4) + {0, 1} of keys 8 i + 2 (l % 4) + {0, 1} in register i. Bytes of registers 0 and 1, and of 2 and 3, are put
// together by column and stored as four 8 x 16 matrices. So in a tile
//   row 16 n + r is column 16 n + 2 r of the values, and row 16 n + 8 + r the column behind it (r < 8);
//   byte 32 g + 16 h + 4 c + 2 b + j is key 32 g + 16 h + 8 b + 2 c + j (h, b, j < 2; c < 4).
// The order of keys is that of the weights in the registers of a product of scores (Softmax::Round), and no load or store
// has a bank conflict. The epilogue puts the columns in order.
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
struct TransposeProducer {
  using Params = typename Tr::Params;
  static constexpr int SHARES = 4 / (Tr::KEYS / 32);                                    // warps that share 32 keys
  static constexpr int QK_COLUMNS = Tr::D_QK / SHARES, VO_COLUMNS = Tr::D_VO / SHARES;  // columns of a warp
  static constexpr int SLAB_BYTES = Tr::KEYS * hopper::SLAB_ROW_BYTES;
  static_assert(QK_COLUMNS % 16 == 0 && VO_COLUMNS % 16 == 0, "whole chunks");

  const Params& p;
  const RowStrides<Params>& strides;
  const Shared<Tr> shared;
  const int lane, first, share;  // first: key of the warp; share: its part of the columns
  QueryBoxes<Tr> query;
  uint32_t k_count = 0, v_count = 0;  // tiles of keys loaded (and values landed), tiles of values transposed
  RowOffsets<Params> row{};           // offsets of key `first + lane` of the step found last

  __device__ __forceinline__ TransposeProducer(const Params& p, const Boxes& boxes, const RowStrides<Params>& strides,
                                               const Shared<Tr>& shared)
      : p(p),
        strides(strides),
        shared(shared),
        lane(int(threadIdx.x) % 32),
        first(int(threadIdx.x) / 32 / SHARES * 32),
        share(int(threadIdx.x) / 32 % SHARES),
        query{p, boxes, shared} {}

  __device__ __forceinline__ void Find(const WorkItem& item, int step) {
    const int token = item.kv_start + step * Tr::KEYS + first + lane;
    row = RowOf<Tr::PAGED>(p, strides, item, token, PageOf<Tr::PAGED, true>(p, item, token));
  }
  __device__ __forceinline__ void Keep() {}

  __device__ __forceinline__ void LoadQuery(const WorkItem& item) {
    if (threadIdx.x == 0) query.Load(item);
    __syncwarp();
  }

  /// Copy keys and values of a step. Values come first: their landing place is free.
  __device__ __forceinline__ void LoadKeys(const WorkItem& item, int step, int) {
    const int room = item.kv_end - (item.kv_start + step * Tr::KEYS) - first;  // keys of the warp that exist
    const auto at = RingAt<Tr>(k_count);
    Copy<VO_COLUMNS>(shared.Landing(k_count % Tr::LANDINGS), p.v, row.v, room);
    shared.KeyBarriers().WaitEmpty(at);
    Copy<QK_COLUMNS>(shared.Keys(at.stage), p.k, row.k, room);
    ptx::MbarrierArriveCopies(shared.KeyBarriers().Full(at.stage));
    ptx::CopyCommit();
    ++k_count;
  }

  /// Transpose the values of a step, after the keys of the next one (if there is one) were copied.
  __device__ __forceinline__ void LoadValues(const WorkItem&, int step) {
    const auto at = RingAt<Tr>(v_count);
    if (step > 0) {
      ptx::CopyWait<1>();
    } else {
      ptx::CopyWait<0>();
    }
    __syncwarp();
    shared.ValueBarriers().WaitEmpty(at);
    Transpose(shared.Landing(v_count % Tr::LANDINGS), shared.Values(at.stage));
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(shared.ValueBarriers().Full(at.stage));
    ++v_count;
  }

 private:
  template <int COLUMNS>
  __device__ __forceinline__ void Copy(uint32_t to, const typename Params::DTypeKV* data, uint32_t offset,
                                       int room) const {
    constexpr int CHUNKS = COLUMNS / 16;
#pragma unroll 2
    for (int i = 0; i < CHUNKS; ++i) {
      const int target = (32 * i + lane) / CHUNKS, column = share * COLUMNS + (32 * i + lane) % CHUNKS * 16;
      const char* from = RowAt<Params>(data, __shfl_sync(~0u, offset, target)) + column;
      ptx::CopyAsync16(
          to + column / 128 * SLAB_BYTES + hopper::Swizzle128((first + target) * hopper::SLAB_ROW_BYTES + column % 128),
          from, target < room);
    }
  }

  __device__ __forceinline__ void Transpose(uint32_t from, uint32_t to) const {
#pragma unroll 2
    for (int i = 0; i < VO_COLUMNS / 16; ++i) {
      const int column = share * VO_COLUMNS + 16 * i;
      uint32_t x[4];
      ptx::LdMatrixTrans(x, from + column / 128 * SLAB_BYTES +
                                hopper::Swizzle128((first + lane) * hopper::SLAB_ROW_BYTES + column % 128));
      ptx::StoreMatrix4(to + hopper::Swizzle128((column + lane % 8 + lane / 16 * 8) * hopper::SLAB_ROW_BYTES + first +
                                                lane / 8 % 2 * 16),
                        __byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420),
                        __byte_perm(x[0], x[1], 0x7531), __byte_perm(x[2], x[3], 0x7531));
    }
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
