// SPDX-License-Identifier: Apache-2.0
// The tiles of a block of GemmSm90Kernel, as its warps see them. Blocks take tiles in turn (block b has b, b + blocks, ...)
// or, where the problem has a counter, when they are free. Tiles of groups of any size take different times, so blocks that
// take turns drift apart, and tiles that share weights no longer read them at the same time: weights of 8 experts of
// 4096 x 28672 came from DRAM four times (7.6 GB, H200; an LRU model gives 7.2 to 8.2 GB, and 2.0 GB with the counter).
// Results do not depend on the block that computes a tile.
//
// The warp that loads operands finds the tiles. It hands each one to the consumers with its first stage, and to the other
// producer warps, which copy scales and gathered rows, at a barrier of these warps.
#pragma once
#include "../../hopper/ring.cuh"
#include "../../ptx/barrier.cuh"
#include "../../ptx/cp_async.cuh"
#include "tiles.cuh"

namespace flashinfer {
namespace gemm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Tiles in shared memory. One that does not exist ends the list.
struct TileSlots {
  static constexpr int OFFSET = 512;  // in the bytes of the barriers
  static constexpr int STAGES = 8;
  Tile of_stage[STAGES];  // the tile whose first stage this is
  Tile of_followers[2];   // the tile that the other producer warps copy next, in turn
};

constexpr int TILE_BARRIER = 2;  // barrier that all producer warps reach

/// Tiles of the warp that loads operands. FOLLOWERS: other producer warps.
template <int BLOCK_M, int STAGES, int FOLLOWERS>
class ProducerTiles {
 public:
  __device__ __forceinline__ ProducerTiles(const TileParams& p, int cluster, int rank, TileSlots* slots)
      : list_(p, rank),
        slots_(slots),
        counter_(p.counter),
        step_(int(gridDim.x) / cluster),
        next_(int(blockIdx.x) / cluster) {}

  /// Get the next tile. Returns false after the last one. Called by all lanes.
  __device__ __forceinline__ bool Next(Tile& tile) {
    bool has_tile;
    do {
      const int t = __shfl_sync(~0u, next_, 0);
      if (counter_ == nullptr) next_ = t + step_;
      has_tile = list_.Get(t, tile);
    } while (has_tile && !tile.exists);
    tile.exists = has_tile;
    if (FOLLOWERS > 0) {
      if (threadIdx.x == 0) slots_->of_followers[turn_] = tile;
      turn_ ^= 1;
      __syncwarp();  // the lanes of a warp must be together at a barrier
      ptx::BarrierSyncApart(TILE_BARRIER, 32 * (1 + FOLLOWERS));
    }
    return has_tile;
  }

  /// Hand the tile to the consumers before its first stage is filled, and take the next one near the end: the later, the
  /// closer in time are tiles of neighbouring numbers. Called by lane 0 for each stage.
  __device__ __forceinline__ void BeginStage(const hopper::Ring<STAGES>& ring, const hopper::RingPosition<STAGES>& at,
                                             const Tile& tile, int kb, int k_blocks) {
    if (kb == 0) {
      ring.WaitEmpty(at);
      slots_->of_stage[at.stage] = tile;
    }
    if (counter_ != nullptr && kb == max(0, k_blocks - AHEAD)) next_ = step_ + atomicAdd(counter_, 1);
  }

  /// Tell the consumers that no tile follows. Called by lane 0.
  __device__ __forceinline__ void End(const hopper::Ring<STAGES>& ring, const hopper::RingPosition<STAGES>& at) {
    ring.WaitEmpty(at);
    slots_->of_stage[at.stage].exists = false;
    ptx::MbarrierArrive(ring.Full(at.stage));
  }

 private:
  static constexpr int AHEAD = 2;  // stages before the end of a tile that the next one is taken: the time of an atomic
  static_assert(STAGES <= TileSlots::STAGES, "one slot per stage");

  TileList<BLOCK_M> list_;
  TileSlots* const slots_;
  int32_t* const counter_;
  const int step_;
  int next_;  // with a counter: in lane 0 only
  int turn_ = 0;
};

/// Tiles of a producer warp that copies scales or rows.
template <int FOLLOWERS>
class FollowerTiles {
 public:
  __device__ __forceinline__ explicit FollowerTiles(TileSlots* slots) : slots_(slots) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    __syncwarp();
    ptx::BarrierSyncApart(TILE_BARRIER, 32 * (1 + FOLLOWERS));
    tile = slots_->of_followers[turn_];
    turn_ ^= 1;
    return tile.exists;
  }

  /// Take part in the stage that tells the consumers the end. Called by all lanes.
  template <int STAGES>
  __device__ __forceinline__ void End(const hopper::Ring<STAGES>& ring, const hopper::RingPosition<STAGES>& at) const {
    ring.WaitEmpty(at);
    ptx::MbarrierArrive(ring.Full(at.stage));
  }

 private:
  TileSlots* const slots_;
  int turn_ = 0;
};

/// Read a tile from shared memory. A 32-bit address takes one register of a consumer, a pointer would take two.
__device__ __forceinline__ Tile LoadTile(uint32_t from) {
  const float4 x = ptx::LoadShared16(from), y = ptx::LoadShared16(from + 16);
  return {(__float_as_int(x.x) & 0xff) != 0,
          __float_as_int(x.y),
          __float_as_int(x.z),
          __float_as_int(x.w),
          __float_as_int(y.x),
          __float_as_int(y.y)};
}

/// Get the next tile of a consumer warp, whose first stage is at `at`. Returns false after the last one. `slots`: address of
/// TileSlots.
template <int STAGES>
__device__ __forceinline__ bool NextTile(uint32_t slots, const hopper::Ring<STAGES>& ring,
                                         const hopper::RingPosition<STAGES>& at, Tile& tile) {
  ring.WaitFull(at);
  tile = LoadTile(slots + at.stage * uint32_t(sizeof(Tile)));
  __syncwarp();  // all lanes have read the slot before lane 0 releases the stage
  return tile.exists;
}

/// Call sum() without the tile in registers: a consumer warp keeps it in 32 bytes of its own shared memory. Called by all
/// lanes.
template <typename Sum>
__device__ __forceinline__ void KeepTile(uint32_t place, Tile& tile, const Sum& sum) {
  if (threadIdx.x % 32 == 0) {
    ptx::StoreShared16(place, {1, uint32_t(tile.row), uint32_t(tile.end_row), uint32_t(tile.n_tile)});
    ptx::StoreShared16(place + 16, {uint32_t(tile.token_batch), uint32_t(tile.weight_batch), 0, 0});
  }
  sum();
  __syncwarp();
  tile = LoadTile(place);
  __syncwarp();  // before results replace it
}

#endif

}  // namespace gemm
}  // namespace flashinfer
