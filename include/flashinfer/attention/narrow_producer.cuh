// SPDX-License-Identifier: Apache-2.0
// The copying side of the narrow kernel (narrow.cuh): its shapes, and which keys of which item a warp fetches next.
#pragma once
#include "tile.cuh"

namespace flashinfer {
namespace attention {
namespace narrow {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;

template <typename Params, int STAGES_>
struct Traits {
  using T = typename Params::DTypeQ;
  using KV = SharedKV<Params>;
  static constexpr int STAGES = STAGES_;
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr bool FP8 = IS_FP8<KV>;
  using KLayout = RowLayout<D_QK* int(sizeof(KV))>;
  using VLayout = RowLayout<D_VO* int(sizeof(KV))>;
  // Keys of a step of a warp. Of short rows twice as many, so that what a step costs besides is paid for as many bytes
  // (H200, 512 MiB of keys: fp8 152.8 -> 147.5 us, 64 columns of bf16 149.5 -> 142.7).
  static constexpr bool SHORT_ROWS = KLayout::CHUNKS <= 8 && VLayout::CHUNKS <= 8;
  static constexpr int KEYS = SHORT_ROWS ? 32 : 16;
  static constexpr int STEP = WARPS * KEYS;  // of a block
  static constexpr int K_BYTES = KEYS * KLayout::PITCH, V_BYTES = KEYS * VLayout::PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  using QLayout = RowLayout<D_QK* int(sizeof(T))>;
  static constexpr int Q_BYTES = NARROW_TILE * QLayout::PITCH,
                       STATS_BYTES = (2 * NARROW_TILE + 2) * WARPS * int(sizeof(float));
  static constexpr int SHARED_BYTES = RING_BYTES + Q_BYTES + STATS_BYTES + 16;
  // Outputs of a warp are merged through the stage of its ring that is free, so many rows at a time.
  static constexpr int MERGE_ROWS = STAGE_BYTES / (D_VO * int(sizeof(float))) >= NARROW_TILE ? NARROW_TILE
                                    : STAGE_BYTES / (D_VO * int(sizeof(float))) >= 8         ? 8
                                                                                             : 4;
  static_assert(MERGE_ROWS * D_VO * int(sizeof(float)) <= STAGE_BYTES, "fp8 keys narrower than values");
  // A part that a cluster merges stays in shared memory: four rows of it in the second stage of each warp's ring.
  static_assert(16 * D_VO <= STAGE_BYTES, "four rows of floats do not fit into a stage");
};

/// Blocks per SM and stages of the ring: as many blocks as have enough stages each (one block has what fits).
template <typename Params>
struct Shape {
  using Tr = Traits<Params, 1>;
  static constexpr int STAGE = Tr::RING_BYTES, REST = Tr::SHARED_BYTES - STAGE;
  static constexpr int StagesOf(int blocks) { return (SharedLimit() / blocks - 1024 * (blocks > 1) - REST) / STAGE; }
  static constexpr int ENOUGH = Tr::SHORT_ROWS ? 2 : 4;  // for three blocks: 96 KB of keys under way
  static constexpr int BLOCKS = Tr::D_VO <= 128 && StagesOf(3) >= ENOUGH ? 3 : (StagesOf(2) >= 2 ? 2 : 1);
  static constexpr int FIT = StagesOf(BLOCKS), STAGES = FIT > 6 ? 6 : FIT;
  static_assert(STAGES >= 1, "heads this large do not fit into shared memory");
};

/// The copying side of a warp: which keys of which item come next. HAS_ONE: of the only one.
template <typename Params, typename Tr, bool PAGED, bool HAS_ONE>
struct Producer {
  static constexpr int KEYS = Tr::KEYS, STEP = Tr::STEP;
  const Params& p;
  const RowStrides<Params>& strides;
  const WorkList& work;
  WorkItem item;
  int token;  // first key of the next copy, for this warp
  // Page table entries of the next steps, one lane each: one for each page that has keys of a step, or one for each key.
  // They are asked for many at a time, since they arrive behind all the keys that are under way (H200: 3 us), and copies
  // wait for them. So does whatever moves them to another register, which is why these are not asked for ahead.
  int pages;
  int next_page;  // the lane that has those of the next step, or the first of them
  int warp;
  uint32_t to, end;  // where the next copy goes (this lane's first chunk of it), and where stages end
  int ahead = 0;     // stages that have keys which were not used yet

  __device__ __forceinline__ Producer(const Params& p, const RowStrides<Params>& strides, const WorkList& work,
                                      const WorkItem& first, int warp, uint32_t ring)
      : p(p), strides(strides), work(work), item(first), warp(warp) {
    // Counted in bytes for each lane, not in stages for the warp: ptxas 13.0 has added uniform stages in the instruction
    // that copies, and that became an illegal one (tests/cuda_compile/test_copy_addresses.py looks for it). `warp` comes from a
    // shuffle, so the difference is 0 and the compiler cannot know.
    to = ring;
    if constexpr (EVEN) {
      to += Tr::KLayout::Offset(FirstRow(), int(threadIdx.x % 32) % CHUNKS);
    } else {
      to += uint32_t(int(threadIdx.x) / 32 - warp) * 16;
    }
    end = to + Tr::STAGES * Tr::STAGE_BYTES;
    token = item.kv_start + warp * KEYS;
    AskPages();
  }

  // Keys and values are copied by as many lanes to a row as it has chunks, such that those lanes copy neighbouring rows one
  // after the other, if they can be.
  static constexpr int CHUNKS = Tr::KLayout::CHUNKS;
  static constexpr bool EVEN =
      !IS_FP4<typename Params::DTypeKV> && CHUNKS > 1 && 32 % CHUNKS == 0 && Tr::VLayout::CHUNKS == CHUNKS;
  static constexpr int TURNS = KEYS * CHUNKS / 32;  // rows of a lane

  /// The first of the rows that this lane copies.
  static __device__ __forceinline__ int FirstRow() { return int(threadIdx.x % 32) / CHUNKS * TURNS; }

  /// The row, of the keys of a step, whose place this lane finds out for others.
  static __device__ __forceinline__ int Row() {
    const int lane = threadIdx.x % 32;
    if constexpr (EVEN) return lane % CHUNKS % TURNS + FirstRow();
    return lane % KEYS;
  }

  /// Entries of the page table that a step takes: its keys begin at a multiple of 16.
  static constexpr int PARTS = KEYS / 16;
  __device__ __forceinline__ int PagesOfStep() const {
    const int page = p.page_size.divisor;
    return page % KEYS == 0 ? 1 : (page % 16 == 0 ? PARTS : KEYS);
  }
  __device__ __forceinline__ void AskPages() {
    if constexpr (PAGED) {
      const int lane = threadIdx.x % 32, each = PagesOfStep();
      const int key = each == 1      ? lane * STEP
                      : each == KEYS ? lane % KEYS + lane / KEYS * STEP
                                     : lane % PARTS * 16 + lane / PARTS * STEP;
      next_page = 0;
      if (HAS_ONE || item.kv_end > 0) pages = PageOf<PAGED, HAS_ONE>(p, item, token + key);
    }
  }
  /// The entry of the page table for key token + Row().
  __device__ __forceinline__ int Page() const {
    if constexpr (PAGED) {
      const int each = PagesOfStep(), entry = each == 1 ? 0 : (each == KEYS ? Row() : Row() / 16);
      return __shfl_sync(0xffffffffu, pages, next_page + entry);
    }
    return 0;
  }

  /// Have as many copies under way as fit. One stage stays free for the outputs of warps, which are merged while keys of the
  /// next item arrive; blocks of one item use it too (H200, paired runs: 128 MiB of keys 0.4 to 1.6 us less, 32 MiB 0.7 to
  /// 1.6; others are 2 % slower with it). To wait for a copy means to wait until so many came after it, so that some may be
  /// of nothing.
  __device__ __forceinline__ void Fill() {
#pragma unroll 1
    for (int i = ahead; i < Tr::STAGES - (HAS_ONE ? 0 : 1);) {
      if (HAS_ONE || token < item.kv_end || item.next < 0) ++i;  // otherwise it only goes on to the next item
      Issue();
    }
  }

  /// Start copying the next keys, if there are any.
  __device__ __forceinline__ void Issue() {
    if (token < item.kv_end) {
      const int page = Page();
      const RowOffsets<Params> row = RowOf<PAGED>(p, strides, item, token + Row(), page);
      const uint32_t v_to = to + Tr::K_BYTES;
      if constexpr (EVEN) {
        CopyEven<typename Tr::KLayout>(to, p.k, row.k);
        CopyEven<typename Tr::VLayout>(v_to, p.v, row.v);
      } else {
        CopyRows<typename Tr::KLayout>(to, p.k, row.k, page, p.k_sf, p.k_sf_stride_page, p.k_sf_stride_n,
                                       p.k_sf_stride_h);
        CopyRows<typename Tr::VLayout>(v_to, p.v, row.v, page, p.v_sf, p.v_sf_stride_page, p.v_sf_stride_n,
                                       p.v_sf_stride_h);
      }
      token += STEP;
      to += Tr::STAGE_BYTES;
      if (to >= end) to -= Tr::STAGES * Tr::STAGE_BYTES;
      ++ahead;
      if constexpr (PAGED) {
        next_page += PagesOfStep();
        if (next_page == 32) AskPages();
      }
    }
    if (!HAS_ONE && token >= item.kv_end && item.next >= 0) NextItem();
    ptx::CopyCommit();
  }

  /// Go on to the item that has the next keys.
  __device__ __forceinline__ void NextItem() {
#pragma unroll 1
    do {
      item = ListItem(p, work, item.next);
      token = item.kv_start + warp * KEYS;
    } while (token >= item.kv_end && item.next >= 0);
    AskPages();
  }

  /// `to`: this lane's chunk of FirstRow().
  template <typename Layout>
  __device__ __forceinline__ void CopyEven(uint32_t to, const typename Params::DTypeKV* data,
                                           RowOffset<Params> offset) {
    const int chunk = int(threadIdx.x % 32) % CHUNKS, left = item.kv_end - token - FirstRow();
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const RowOffset<Params> from = __shfl_sync(0xffffffffu, offset, i, CHUNKS) + chunk;  // in chunks, as that is
      ptx::CopyAsync16(Layout::Moved(to, i), RowAt<Params>(data, from), i < left, work.reads_past_cache);
    }
  }

  template <typename Layout>
  __device__ __forceinline__ void CopyRows(uint32_t to, const typename Params::DTypeKV* data, RowOffset<Params> offset,
                                           [[maybe_unused]] int page, const uint8_t* sf, int64_t sf_page, int64_t sf_n,
                                           int64_t sf_h) {
    const int lane = threadIdx.x % 32;
    constexpr int TOTAL = KEYS * Layout::CHUNKS, EACH = (TOTAL + 31) / 32;
    [[maybe_unused]] int64_t sf_offset = 0;
    if constexpr (IS_FP4<typename Params::DTypeKV>) {
      const int at = token + lane % KEYS;
      if constexpr (PAGED) {
        sf_offset = page * sf_page + (at - int64_t(p.page_size.Divide(at)) * p.page_size.divisor) * sf_n;
      } else {
        sf_offset = (int64_t(item.kv_begin) + at) * sf_n;
      }
      sf_offset += item.kv_head * sf_h;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int id = i * 32 + lane, row = id / Layout::CHUNKS, chunk = id % Layout::CHUNKS;
      const char* from = RowAt<Params>(data, __shfl_sync(0xffffffffu, offset, row % KEYS));
      const bool valid = token + row < item.kv_end;
      if constexpr (IS_FP4<typename Params::DTypeKV>) {
        const int64_t scales = __shfl_sync(0xffffffffu, sf_offset, row % KEYS);
        if (TOTAL % 32 == 0 || row < KEYS) {
          ExpandChunk<typename Tr::T>(to + Layout::Offset(row, chunk), from, sf + scales, chunk, valid);
        }
      } else if (TOTAL % 32 == 0 || row < KEYS) {
        ptx::CopyAsync16(to + Layout::Offset(row, chunk), from + chunk * 16, valid, work.reads_past_cache);
      }
    }
  }
};

}  // namespace narrow
}  // namespace attention
}  // namespace flashinfer
