// SPDX-License-Identifier: Apache-2.0
// Producer of the decode kernel (kernel.cuh): tile shapes, and the order in which a warp copies keys.
#pragma once
#include "../../ptx/barrier.cuh"
#include "../common/tile.cuh"

namespace flashinfer {
namespace attention {
namespace decode {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;

/// The threads that run a decode block: all threads of a block, or one of several teams of a larger block
/// (fused/kernel_sm90.cuh).
template <bool IS_TEAM>
struct Threads {
  static __device__ __forceinline__ uint32_t Index() { return IS_TEAM ? threadIdx.x % THREADS : threadIdx.x; }
  static __device__ __forceinline__ int Warp() { return int(Index() / 32); }
  static __device__ __forceinline__ void Sync() {
    if constexpr (IS_TEAM) {
      ptx::BarrierSync(1 + int(threadIdx.x) / THREADS, THREADS);
    } else {
      __syncthreads();
    }
  }
};

template <typename Params, int STAGES_, bool IS_TEAM = false>
struct Traits {
  using Team = Threads<IS_TEAM>;
  using T = typename Params::DTypeQ;
  using KV = SharedKV<Params>;
  static constexpr int STAGES = STAGES_;
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr bool FP8 = IS_FP8<KV>;
  using KLayout = RowLayout<D_QK* int(sizeof(KV))>;
  using VLayout = RowLayout<D_VO* int(sizeof(KV))>;
  // Keys per step of a warp; twice as many for short rows, to amortise the fixed cost of a step over as many bytes
  // (H200, 512 MiB of keys: fp8 152.8 -> 147.5 us, 64 columns of bf16 149.5 -> 142.7).
  static constexpr bool SHORT_ROWS = KLayout::CHUNKS <= 8 && VLayout::CHUNKS <= 8;
  static constexpr int KEYS = SHORT_ROWS ? 32 : 16;
  static constexpr int STEP = WARPS * KEYS;  // keys per step of a block
  static constexpr int K_BYTES = KEYS * KLayout::PITCH, V_BYTES = KEYS * VLayout::PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  using QLayout = RowLayout<D_QK* int(sizeof(T))>;
  static constexpr int Q_BYTES = DECODE_TILE * QLayout::PITCH,
                       STATS_BYTES = (2 * DECODE_TILE + 2) * WARPS * int(sizeof(float));
  static constexpr int SHARED_BYTES = RING_BYTES + Q_BYTES + STATS_BYTES + 16;
  // Rows per pass of the merge: outputs of a warp go through the free stage of its ring.
  static constexpr int MERGE_ROWS = STAGE_BYTES / (D_VO * int(sizeof(float))) >= DECODE_TILE ? DECODE_TILE
                                    : STAGE_BYTES / (D_VO * int(sizeof(float))) >= 8         ? 8
                                                                                             : 4;
  static_assert(MERGE_ROWS * D_VO * int(sizeof(float)) <= STAGE_BYTES, "fp8 keys narrower than values");
  // Parts of a cluster stay in shared memory: four rows in the second stage of each warp's ring.
  static_assert(16 * D_VO <= STAGE_BYTES, "four rows of floats do not fit into a stage");
};

/// Blocks per SM and stages of the ring: as many blocks as get enough stages each (a single block gets what fits).
template <typename Params>
struct Shape {
  using Tr = Traits<Params, 1>;
  static constexpr int STAGE = Tr::RING_BYTES, REST = Tr::SHARED_BYTES - STAGE;
  static constexpr int StagesOf(int blocks) {
    return (device::SharedLimit() / blocks - 1024 * (blocks > 1) - REST) / STAGE;
  }
  static constexpr int ENOUGH = Tr::SHORT_ROWS ? 2 : 4;  // stages for three blocks per SM: 96 KB of keys in flight
  static constexpr int BLOCKS = Tr::D_VO <= 128 && StagesOf(3) >= ENOUGH ? 3 : (StagesOf(2) >= 2 ? 2 : 1);
  static constexpr int FIT = StagesOf(BLOCKS), STAGES = FIT > 6 ? 6 : FIT;
  static_assert(STAGES >= 1, "heads this large do not fit into shared memory");
};

/// Producer of a warp. SINGLE_ITEM: copies the keys of one item only.
template <typename Params, typename Tr, bool PAGED, bool SINGLE_ITEM>
struct Producer {
  static constexpr int KEYS = Tr::KEYS, STEP = Tr::STEP;
  const Params& p;
  const RowStrides<Params>& strides;
  const WorkList& work;
  WorkItem item;
  int token;  // first key of this warp's next copy
  // Page-table entries of the next steps, one per lane: one for each page that has keys of a step, or one for each key.
  // They are loaded many at a time because they arrive behind all keys in flight (H200: 3 us) and copies wait for them.
  // Moving them to another register would wait too, so they are not loaded ahead.
  int pages;
  int next_page;  // lane that holds the (first) entry of the next step
  int warp;
  uint32_t to, end;  // destination of the next copy (this lane's first chunk), and end of the stages
  int ahead = 0;     // number of filled stages that were not consumed yet

  __device__ __forceinline__ Producer(const Params& p, const RowStrides<Params>& strides, const WorkList& work,
                                      const WorkItem& first, int warp, uint32_t ring)
      : p(p), strides(strides), work(work), item(first), warp(warp) {
    // Counted in bytes per lane, not in stages per warp: ptxas 13.0 folded the addition of uniform stages into the copy
    // instruction, which became an illegal instruction.
    to = ring;
    if constexpr (EVEN) {
      to += Tr::KLayout::Offset(FirstRow(), int(threadIdx.x % 32) % CHUNKS);
    } else {
      to += uint32_t(Tr::Team::Warp() - warp) * 16;
    }
    end = to + Tr::STAGES * Tr::STAGE_BYTES;
    token = item.kv_start + warp * KEYS;
    AskPages();
  }

  // EVEN: a row is copied by as many lanes as it has chunks, and those lanes copy neighbouring rows one after the
  // other.
  static constexpr int CHUNKS = Tr::KLayout::CHUNKS;
  static constexpr bool EVEN =
      !IS_FP4<typename Params::DTypeKV> && CHUNKS > 1 && 32 % CHUNKS == 0 && Tr::VLayout::CHUNKS == CHUNKS;
  static constexpr int TURNS = KEYS * CHUNKS / 32;  // rows per lane

  /// First row that this lane copies.
  static __device__ __forceinline__ int FirstRow() { return int(threadIdx.x % 32) / CHUNKS * TURNS; }

  /// Row of a step whose address this lane computes for the other lanes.
  static __device__ __forceinline__ int Row() {
    const int lane = threadIdx.x % 32;
    if constexpr (EVEN) return lane % CHUNKS % TURNS + FirstRow();
    return lane % KEYS;
  }

  /// Page-table entries per step: its keys begin at a multiple of 16.
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
      if (SINGLE_ITEM || item.kv_end > 0) pages = PageOf<PAGED, SINGLE_ITEM>(p, item, token + key);
    }
  }
  /// Page-table entry of key token + Row().
  __device__ __forceinline__ int Page() const {
    if constexpr (PAGED) {
      const int each = PagesOfStep(), entry = each == 1 ? 0 : (each == KEYS ? Row() : Row() / 16);
      return __shfl_sync(0xffffffffu, pages, next_page + entry);
    }
    return 0;
  }

  /// Issue as many copies as fit. One stage stays free for the outputs of warps, which are merged while keys of the
  /// next item arrive; single-item blocks use it too (H200, fused launches: 128 MiB of keys 0.4 to 1.6 us less, 32 MiB
  /// 0.7 to 1.6; others are 2 % slower with it). Waiting for a copy means waiting until a number of copies came after
  /// it, so some copies may be empty.
  __device__ __forceinline__ void Fill() {
#pragma unroll 1
    for (int i = ahead; i < Tr::STAGES - (SINGLE_ITEM ? 0 : 1);) {
      if (SINGLE_ITEM || token < item.kv_end || item.next < 0) ++i;  // otherwise Issue only moves on to the next item
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
    if (!SINGLE_ITEM && token >= item.kv_end && item.next >= 0) NextItem();
    ptx::CopyCommit();
  }

  /// Advance to the next item that has keys.
  __device__ __forceinline__ void NextItem() {
#pragma unroll 1
    do {
      item = ListItem(p, work, item.next);
      token = item.kv_start + warp * KEYS;
    } while (token >= item.kv_end && item.next >= 0);
    AskPages();
  }

  /// Copy the rows of this lane; `to` is its chunk of FirstRow().
  template <typename Layout>
  __device__ __forceinline__ void CopyEven(uint32_t to, const typename Params::DTypeKV* data,
                                           RowOffset<Params> offset) {
    const int chunk = int(threadIdx.x % 32) % CHUNKS, left = item.kv_end - token - FirstRow();
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const RowOffset<Params> from = __shfl_sync(0xffffffffu, offset, i, CHUNKS) + chunk;  // in chunks of 16 bytes
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

}  // namespace decode
}  // namespace attention
}  // namespace flashinfer
