// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: tile sizes, shared memory and barriers (kernel.cuh has the overview).
//
// A block computes 64 rows (query token, head) of a request. The query, 64 x 576, stays in shared memory. Keys arrive
// in blocks of 64, in two buffers of 64 x 576; the first 512 columns are also the values. Query and keys are nine slabs
// of 64 rows by 64 columns (hopper/smem_tile.cuh): slabs 0 to 7 are the latent columns, slab 8 the rotary columns.
#pragma once
#include "../../hopper/roles.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/barrier.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/setmaxnreg.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../common/backend_interface.h"
#include "../common/convert.cuh"
#include "../common/work_items.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

constexpr int ROWS = 64;  // rows of a tile
constexpr int KEYS = 64;  // keys of a block
constexpr int LATENT = 512, ROTARY = 64;
constexpr int HALF = LATENT / 2;  // output columns of a consumer warpgroup
constexpr int SLAB_COLUMNS = 64, SLABS = 9, ROTARY_SLAB = 8;
constexpr int HALF_SLABS = HALF / SLAB_COLUMNS;
constexpr int SLAB_BYTES = 64 * hopper::SLAB_ROW_BYTES;
constexpr int TILE_BYTES = SLABS * SLAB_BYTES;
using hopper::WARPGROUP;
constexpr int THREADS = 3 * WARPGROUP;  // a producer and two consumers
/// Registers per thread; the three warpgroups share 504. Copies with cp.async hold addresses of rows.
template <bool COPIED>
inline constexpr int PRODUCER_REGISTERS = COPIED ? 72 : 40;
template <bool COPIED>
inline constexpr int CONSUMER_REGISTERS = COPIED ? 216 : 232;
/// Parts in which a warpgroup multiplies and releases its columns of the values, 1, 2 or 4: parts of fewer columns let
/// the next keys come earlier, and narrower products read the weights more often.
constexpr int PARTS = 2;
constexpr int STAGING_BYTES = 1024;  // per consumer warp: 16 rows by 32 columns of results

/// Barriers of some warps.
enum class NamedBarrier : int {
  kFirstWeights = 1,  // first warpgroup: weights of its block, and maxima, are in shared memory
  kSecondWeights,     // second warpgroup: likewise
  kSums,              // both: row sums
  kZeroed,            // kZeroed + g: warpgroup g alone, after it has cleared rows without keys
};

/// Memory of a block. `base` is the shared address, aligned to 1024, and `memory` the same as a pointer.
struct Shared {
  static constexpr int KEYS_AT = TILE_BYTES;
  static constexpr int STAGING_AT = 3 * TILE_BYTES;
  static constexpr int ROWS_AT = STAGING_AT + 8 * STAGING_BYTES;  // six arrays of one float per row
  static constexpr int BARRIERS_AT = ROWS_AT + 6 * ROWS * int(sizeof(float));
  static constexpr int BARRIERS = 4 * SLABS + 2;
  static constexpr int BYTES = BARRIERS_AT + BARRIERS * 8 + hopper::SLAB_ALIGNMENT;  // with room to align the base

  uint32_t base;
  char* memory;

  __device__ __forceinline__ uint32_t Query() const { return base; }
  __device__ __forceinline__ uint32_t Keys(int buffer) const { return base + KEYS_AT + buffer * TILE_BYTES; }
  /// Weights of the block in `buffer`, 64 x 64. They replace the rotary columns, which only the scores need.
  __device__ __forceinline__ uint32_t Weights(int buffer) const { return Keys(buffer) + ROTARY_SLAB * SLAB_BYTES; }
  __device__ __forceinline__ uint32_t Staging(int warp) const { return base + STAGING_AT + warp * STAGING_BYTES; }
  __device__ __forceinline__ float* Maxima(int group) const { return Floats(group); }
  /// Row sums of a warpgroup. Even and odd items have their own: a warpgroup may write those of an item while the other
  /// reads those of the item before.
  __device__ __forceinline__ float* Sums(int group, uint32_t is_odd) const { return Floats(2 + 2 * is_odd + group); }

  /// mbarrier that a slab of keys has landed.
  __device__ __forceinline__ uint32_t Full(int buffer, int slab) const { return Barrier(buffer * SLABS + slab); }
  /// mbarrier that a slab of keys may be overwritten.
  __device__ __forceinline__ uint32_t Empty(int buffer, int slab) const { return Barrier((2 + buffer) * SLABS + slab); }
  __device__ __forceinline__ uint32_t QueryFull() const { return Barrier(4 * SLABS); }
  __device__ __forceinline__ uint32_t QueryEmpty() const { return Barrier(4 * SLABS + 1); }

 private:
  __device__ __forceinline__ float* Floats(int which) const {
    return reinterpret_cast<float*>(memory + ROWS_AT) + which * ROWS;
  }
  __device__ __forceinline__ uint32_t Barrier(int i) const { return base + BARRIERS_AT + 8 * i; }
};
static_assert(Shared::BYTES <= hopper::MAX_SHARED_BYTES, "shared memory of a block");

/// Return true if boxes of pages of this size tile a block of keys, and are large enough for TMA.
inline bool PagesAreBoxes(int page_size) { return page_size % KEYS == 0 || (page_size >= 8 && KEYS % page_size == 0); }

/// A producer warp fills half of the latent slabs of a buffer, which one consumer warpgroup releases. The rotary slab (the
/// weights) belongs to the half of the warpgroup that did not compute the weights, which reads and releases them.
__device__ __forceinline__ bool HasRotary(int buffer, int half) { return half != buffer; }

/// Number of blocks of keys of an item.
__device__ __forceinline__ int BlocksOf(const WorkItem& item) {
  return (max(item.kv_end - item.kv_start, 0) + KEYS - 1) / KEYS;
}

/// Work items of a thread block. Producer and consumers each iterate over the same list.
template <typename Params>
class ItemList {
 public:
  __device__ __forceinline__ ItemList(const Params& p, const WorkList& work)
      : p_(p), work_(work), share_(int(blockIdx.x)) {}

  __device__ __forceinline__ WorkItem First() const { return FirstItem<ROWS, false>(p_, work_, share_); }

  /// Replace `item` by the next one. Returns false after the last item.
  __device__ __forceinline__ bool Next(WorkItem& item) {
    if (!work_.has_shares) return false;
    if (item.next < 0 && (share_ += work_.blocks) >= *work_.num_items) return false;
    item = ListItem(p_, work_, item.next < 0 ? share_ : item.next);
    return item.request >= 0;
  }

 private:
  const Params& p_;
  const WorkList& work_;
  int share_;
};

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
