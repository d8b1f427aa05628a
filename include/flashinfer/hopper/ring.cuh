// SPDX-License-Identifier: Apache-2.0
// Ring buffer of stages in shared memory between one producer and several consumer warps, also across a cluster.
//
// Each stage has two mbarriers: `full` ends a phase when the producers have arrived and their bytes have landed, `empty`
// when all consumer warps (of all blocks that the producer's multicasts write to) have arrived. A position counts the
// stages passed. The producer waits for the opposite of its parity, which a new barrier has already passed.
#pragma once
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"

namespace flashinfer {
namespace hopper {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Position of the producer or of a consumer in a ring of STAGES stages.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }

  /// Advance by STEP stages, as one of STEP producers that fill stages in turn. A stage always has the same producer: one
  /// that had not waited for the phase before would take it for the one before that, of the same parity as the next.
  template <int STEP>
  __device__ __forceinline__ void Skip() {
    static_assert(STAGES % STEP == 0, "producers of a stage");
    stage += STEP;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

/// Lanes of a warp that arrive where it releases a stage. One is enough after __syncwarp, an order that racecheck does not
/// know: for that tool, all lanes arrive (scripts/sanitize.py).
#ifdef FLASHINFER_RACECHECK
constexpr uint32_t RELEASING_LANES = 32;
#else
constexpr uint32_t RELEASING_LANES = 1;
#endif

/// Barriers of a ring. `barriers` is the shared-memory address of 2 * STAGES mbarriers.
template <int STAGES>
struct Ring {
  static constexpr int BYTES = 2 * STAGES * 8;
  uint32_t barriers;

  __device__ __forceinline__ uint32_t Full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t Empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  /// Initialise the mbarriers. `producers`: arrivals that fill a stage, one of them by BeginFill(). Called by one
  /// thread; a barrier of the block (or cluster) must follow.
  __device__ __forceinline__ void Init(uint32_t consumer_warps, uint32_t producers = 1) const {
    for (int i = 0; i < STAGES; ++i) {
      ptx::MbarrierInit(Full(i), producers);
      ptx::MbarrierInit(Empty(i), consumer_warps * RELEASING_LANES);
    }
    ptx::MbarrierInitFence();
  }

  /// Wait until the stage may be written.
  __device__ __forceinline__ void WaitEmpty(const RingPosition<STAGES>& at) const {
    ptx::MbarrierWait(Empty(at.stage), at.parity ^ 1);
  }

  /// Wait until the stage may be written, and announce `bytes` of loads. Returns the mbarrier that the loads must
  /// signal.
  __device__ __forceinline__ uint32_t BeginFill(const RingPosition<STAGES>& at, uint32_t bytes) const {
    WaitEmpty(at);
    ptx::MbarrierArriveExpect(Full(at.stage), bytes);
    return Full(at.stage);
  }

  /// Wait until the stage has been filled.
  __device__ __forceinline__ void WaitFull(const RingPosition<STAGES>& at) const {
    ptx::MbarrierWait(Full(at.stage), at.parity);
  }

  /// Release a stage to the producers of `blocks` blocks. Called by all lanes of a consumer warp, after its reads.
  __device__ __forceinline__ void Release(int stage, uint32_t blocks) const {
    const uint32_t lane = threadIdx.x % 32;
    if (blocks == 1) {
      if (lane < RELEASING_LANES) ptx::MbarrierArrive(Empty(stage));
    } else if (RELEASING_LANES > 1) {
      for (uint32_t rank = 0; rank < blocks; ++rank) ptx::MbarrierArriveCluster(Empty(stage), rank);
    } else if (lane < blocks) {
      ptx::MbarrierArriveCluster(Empty(stage), lane);
    }
  }
};

#endif

}  // namespace hopper
}  // namespace flashinfer
