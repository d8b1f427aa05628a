// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 weights, whose two consumer warpgroups take the stages of the ring in turn instead of sharing rows: one sums
// the even and one the odd K blocks of a tile. They then add their accumulators through shared memory, and each finishes every
// other fragment of 8 tokens. A ring has an even number of stages, so that a stage always belongs to the same warpgroup.
//
// 7168 weights are 112 such tiles instead of 56 of 128, so that most SMs load: TMA alone reads 7168 x 4096 bf16 in 20.9 us
// instead of 24.7 (H200, L2 overwritten before).
#pragma once
#include "../../ptx/barrier.cuh"
#include "params.cuh"

namespace flashinfer {
namespace gemm {

/// Shared memory of AlternateSum for tiles of TOKENS tokens: a slot of 16 bytes for each thread and fragment that it
/// gives.
template <int TOKENS>
struct AlternateBuffer {
  static constexpr int FRAGMENTS = TOKENS / 8;
  static constexpr int OWN = FRAGMENTS > 1 ? FRAGMENTS / 2 : 1;  // fragments that a warpgroup finishes
  static constexpr int GIVERS = FRAGMENTS > 1 ? CONSUMERS : 1;   // warpgroups that give; one fragment is kept by 0
  static constexpr int SLOTS = GIVERS * OWN * WARPGROUP;         // slots per tile
  static constexpr int BYTES = 2 * SLOTS * int(sizeof(float4));  // tiles take the halves in turn
  static_assert(FRAGMENTS == 1 || FRAGMENTS % 2 == 0, "halves of the fragments");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// K blocks that one of two warpgroups or warps that take even and odd stages has, tile after tile. Number 0 has stage
/// 0.
class AlternateStages {
 public:
  __device__ __forceinline__ explicit AlternateStages(int first) : offset_(first) {}

  /// Return how many K blocks of the next tile, which has `k_blocks`, it has.
  __device__ __forceinline__ int Count(int k_blocks) {
    const int count = (k_blocks + 1 - offset_) / 2;
    offset_ += 2 * count - k_blocks;
    return count;
  }

 private:
  int offset_;  // offset of the first K block of this one in the next tile: 0 or 1
};

/// Accumulators of both consumer warpgroups, whose threads of equal index have the same elements of the tile. Two have
/// one sum in either order, so results do not depend on which warpgroup had the even K blocks. Two tiles use different
/// slots, so one barrier per tile is enough.
template <int TOKENS>
class AlternateSum {
 public:
  using Buffer = AlternateBuffer<TOKENS>;

  /// `slots`: Buffer::BYTES of shared memory.
  __device__ __forceinline__ explicit AlternateSum(unsigned char* slots) : slots_(reinterpret_cast<float4*>(slots)) {}

  /// Return the number of fragment `i` of those that a warpgroup finishes.
  __device__ __forceinline__ static int Fragment(int i, int group) { return CONSUMERS * i + group; }

  /// Compute the fragments of the tile that this warpgroup finishes from the accumulators `d` of both. Called by all consumers.
  __device__ __forceinline__ void Add(const float (&d)[TOKENS / 2], float (&own)[4 * Buffer::OWN], int group) {
    float4* const slots = slots_ + turn_ * Buffer::SLOTS + threadIdx.x % WARPGROUP;
    turn_ ^= 1;
    if constexpr (Buffer::FRAGMENTS == 1) {
      if (group == 1) slots[0] = float4{d[0], d[1], d[2], d[3]};
      ptx::BarrierSync(int(NamedBarrier::kConsumers), CONSUMERS * WARPGROUP);
      const float4 other = group == 0 ? slots[0] : float4{};
      own[0] = d[0] + other.x, own[1] = d[1] + other.y, own[2] = d[2] + other.z, own[3] = d[3] + other.w;
    } else {
      const bool is_first = group == 0;
#pragma unroll
      for (int i = 0; i < Buffer::OWN; ++i) {
        float given[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          own[4 * i + c] = is_first ? d[8 * i + c] : d[8 * i + 4 + c];
          given[c] = is_first ? d[8 * i + 4 + c] : d[8 * i + c];
        }
        slots[(group * Buffer::OWN + i) * WARPGROUP] = float4{given[0], given[1], given[2], given[3]};
      }
      ptx::BarrierSync(int(NamedBarrier::kConsumers), CONSUMERS * WARPGROUP);
#pragma unroll
      for (int i = 0; i < Buffer::OWN; ++i) {
        const float4 other = slots[((1 - group) * Buffer::OWN + i) * WARPGROUP];
        own[4 * i] += other.x, own[4 * i + 1] += other.y, own[4 * i + 2] += other.z, own[4 * i + 3] += other.w;
      }
    }
  }

 private:
  float4* const slots_;
  int turn_ = 0;
};

#endif

}  // namespace gemm
}  // namespace flashinfer
