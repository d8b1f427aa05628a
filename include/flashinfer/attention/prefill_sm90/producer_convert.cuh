// SPDX-License-Identifier: Apache-2.0
// Producer of the Hopper prefill kernel for 8-bit keys and values under 16-bit queries. All threads of the warpgroup
// copy tiles to a landing buffer by cp.async, from any rows, and turn them into the fp16 tiles that consumers multiply.
// A tile is converted once; consumers only multiply.
//
// Budget of a step of 128 keys, head dim 128 (sm_90a code): a thread converts 16 chunks of 16 numbers in 15 instructions
// each (45 if they became bf16), so a scheduler issues about 450 for the producer with its copies, while products take 2048
// clocks. Shared memory is the limit: products read 160 KB (queries, and keys and values once for each consumer), the
// conversion moves 128 KB more (32 landing, 32 loaded, 64 stored), which takes 2304 clocks in all.
//
// A thread converts what it copied itself, so landing needs neither barriers nor a swizzle. Tr::LANDINGS tiles are under
// way: a tile is converted when its place is needed for the next one. The query of an item is loaded when its first keys
// are converted, because consumers free the query before only after the tiles that precede those keys.
//
// Thread t, lane l, of a warp that has KEYS / 4 rows: chunk (g, slab) is row 8 g + l / 4, columns 64 slab + 16 (l % 4) on.
// Its 32 bytes are chunks 2 (l % 4) and the next of the 16-bit row; eight lanes write one of them for two rows, in
// different banks under the swizzle.
#pragma once
#include "../common/convert.cuh"
#include "producer.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Convert 4 numbers: `low` gets those of bytes 0 and 1, `high` those of bytes 2 and 3.
template <typename To, typename From>
__device__ __forceinline__ void Widen(uint32_t x, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<To, __half>) {
    HalvesOf<From>(x, low, high);
  } else {
    ExpandFp8<To, From>(__byte_perm(x, 0, 0x3120), low, high);
  }
}

template <typename Tr>
struct ConvertProducer {
  using Params = typename Tr::Params;
  static constexpr int ROWS = Tr::KEYS / 4, GROUPS = ROWS / 8;  // rows of a warp, and groups of eight of them
  static constexpr int SLABS = Tr::QK_SLABS > Tr::VO_SLABS ? Tr::QK_SLABS : Tr::VO_SLABS;
  static_assert(ROWS % 8 == 0, "whole groups of rows");
  enum Kind : uint32_t { kNothing, kKeys, kValues, kFirstKeys };  // kFirstKeys: of an item, followed by its query

  const Params& p;
  const RowStrides<Params>& strides;
  const Shared<Tr> shared;
  const int lane, first;  // first: row of the warp
  QueryBoxes<Tr> query;
  uint32_t k_count = 0, v_count = 0;  // tiles converted
  uint32_t kinds = 0;                 // kinds of the tiles under way, the latest in the lowest two bits
  int slot = 0;                       // landing place of the oldest one, which the next one takes
  RowOffsets<Params> row{};           // offsets of row `first + lane` of the step found last
  uint32_t kept = 0;                  // offset of that row's value in the step before

  __device__ __forceinline__ ConvertProducer(const Params& p, const Boxes& boxes, const RowStrides<Params>& strides,
                                             const Shared<Tr>& shared)
      : p(p),
        strides(strides),
        shared(shared),
        lane(int(threadIdx.x) % 32),
        first(int(threadIdx.x) / 32 * ROWS),
        query{p, boxes, shared} {}

  __device__ __forceinline__ void Find(const WorkItem& item, int step) {
    const int token = item.kv_start + step * Tr::KEYS + first + lane;
    row = RowOf<Tr::PAGED>(p, strides, item, token, PageOf<Tr::PAGED, true>(p, item, token));
  }
  __device__ __forceinline__ void Keep() { kept = row.v; }

  __device__ __forceinline__ void LoadKeys(const WorkItem& item, int step, int) { Load(item, step, false); }
  __device__ __forceinline__ void LoadValues(const WorkItem& item, int step) { Load(item, step, true); }
  /// Note the query for the time when the keys loaded last are converted.
  __device__ __forceinline__ void LoadQuery(const WorkItem& item) {
    kinds |= kFirstKeys;
    if (threadIdx.x == 0) {
      const int last = slot == 0 ? Tr::LANDINGS - 1 : slot - 1;
      ptx::StoreShared16(shared.Noted(last), uint4{uint32_t(query.Head(item)), uint32_t(query.Token(item)), 0, 0});
    }
  }
  /// Convert what is under way.
  __device__ __forceinline__ void Finish() {
#pragma unroll 1
    for (int i = 0; i < Tr::LANDINGS; ++i) {
      ConvertOldest();
      Push(kNothing);
    }
  }

 private:
  __device__ __forceinline__ uint32_t Landing(int group, int slab) const {
    return shared.Landing(slot) + ((slab * GROUPS + group) * WARPGROUP + threadIdx.x) * 16;
  }
  /// True if the tile has the chunk of this lane in `slab`.
  __device__ __forceinline__ bool HasChunk(int slab, bool is_value) const {
    return 64 * slab + 16 * (lane % 4) < (is_value ? Tr::D_VO : Tr::D_QK);
  }
  __device__ __forceinline__ void Push(Kind kind) {
    ptx::CopyCommit();
    kinds = kinds << 2 | kind;
    slot = slot + 1 == Tr::LANDINGS ? 0 : slot + 1;
  }

  __device__ __forceinline__ void Load(const WorkItem& item, int step, bool is_value) {
    ConvertOldest();
    const auto* data = is_value ? p.v : p.k;
    const uint32_t offset = is_value ? kept : row.k;
    const int room = item.kv_end - (item.kv_start + step * Tr::KEYS) - first;  // rows of the warp that exist
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int at = 8 * group + lane / 4;
      const char* from = RowAt<Params>(data, __shfl_sync(~0u, offset, at)) + 16 * (lane % 4);
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (HasChunk(slab, is_value)) ptx::CopyAsync16(Landing(group, slab), from + 64 * slab, at < room);
      }
    }
    Push(is_value ? kValues : kKeys);
  }

  __device__ __forceinline__ void ConvertOldest() {
    const uint32_t kind = kinds >> (2 * (Tr::LANDINGS - 1)) & 3;
    if (kind == kNothing) return;
    const bool is_value = kind == kValues;
    const auto at = RingAt<Tr>(is_value ? v_count++ : k_count++);
    const auto ring = is_value ? shared.ValueBarriers() : shared.KeyBarriers();
    ptx::CopyWait<Tr::LANDINGS - 1>();
    ring.WaitEmpty(at);
    Convert(is_value ? shared.Values(at.stage) : shared.Keys(at.stage), is_value);
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(ring.Full(at.stage));
    if (kind == kFirstKeys && threadIdx.x == 0) {
      const float4 noted = ptx::LoadShared16(shared.Noted(slot));
      query.Load(__float_as_int(noted.x), __float_as_int(noted.y));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Convert(uint32_t tile, bool is_value) const {
    const uint32_t to = tile + hopper::Swizzle128((first + lane / 4) * hopper::SLAB_ROW_BYTES +
                                                  lane % 4 * 32);  // address of group 0 and slab 0
    if constexpr (std::is_same_v<typename Tr::T, typename Tr::W>) {
      ConvertTo<typename Tr::T>(to, is_value);
    } else if (is_value) {
      ConvertTo<typename Tr::W>(to, true);
    } else {
      ConvertTo<typename Tr::T>(to, false);
    }
  }

  /// Each chunk is loaded before the previous one is converted: a scheduler has one warp of the producer, which would
  /// wait for its loads.
  template <typename To>
  __device__ __forceinline__ void ConvertTo(uint32_t to, bool is_value) const {
    const uint32_t other = to ^ 16;  // chunk beside the first
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      if (!HasChunk(slab, is_value)) continue;
      float4 next = ptx::LoadShared16(Landing(0, slab));
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const float4 x = next;
        if (group + 1 < GROUPS) next = ptx::LoadShared16(Landing(group + 1, slab));
        uint4 low, high;
        Widen4<To>(x.x, low.x, low.y);
        Widen4<To>(x.y, low.z, low.w);
        Widen4<To>(x.z, high.x, high.y);
        Widen4<To>(x.w, high.z, high.w);
        const uint32_t row = (slab * Tr::KEYS + 8 * group) * hopper::SLAB_ROW_BYTES;
        ptx::StoreShared16(to + row, low);
        ptx::StoreShared16(other + row, high);
      }
    }
  }
  template <typename To>
  static __device__ __forceinline__ void Widen4(float x, uint32_t& low, uint32_t& high) {
    Widen<To, typename Params::DTypeKV>(__float_as_uint(x), low, high);
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
