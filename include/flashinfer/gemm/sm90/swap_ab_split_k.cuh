// SPDX-License-Identifier: Apache-2.0
// Split-K reduction in a cluster: each block sums a part of K of the same tile, then the blocks exchange partial sums
// through shared memory. Accumulators come in fragments of 8 tokens. Block j % size finishes fragment j: it adds the
// partial sums in the order of the ranks, so that results do not depend on timing.
#pragma once
#include "../../host_device.h"
#include "../../ptx/cluster.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/send.cuh"
#include "params.cuh"

namespace flashinfer {
namespace gemm {

/// Receive buffer of a block for tiles of TOKENS tokens: a slot of 16 bytes per consumer thread for each other block and
/// each fragment that the block finishes.
template <int TOKENS>
struct SplitBuffer {
  static constexpr int FRAGMENTS = TOKENS / 8;
  static constexpr int MAX_SPLIT = TOKENS > 64 ? 4 : 8;  // blocks per cluster
  static constexpr int SLOT_BYTES = CONSUMERS * WARPGROUP * 16;

  FLASHINFER_HD static constexpr int OwnFragments(int split) { return (FRAGMENTS + split - 1) / split; }
  static constexpr int Bytes(int split) { return (split - 1) * OwnFragments(split) * SLOT_BYTES; }
  static constexpr int MaxBytes() { return BytesUpTo(MAX_SPLIT); }
  static constexpr int BytesUpTo(int most) {
    int bytes = 0;
    for (int split = 2; split <= most; ++split) bytes = Bytes(split) > bytes ? Bytes(split) : bytes;
    return bytes;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Exchange of partial sums between the consumer warps of a cluster. `received` ends a phase when all partial sums of a
/// tile have arrived in this block, `taken` when all blocks have read what this block sent them.
template <int TOKENS>
class SplitSum {
 public:
  using Buffer = SplitBuffer<TOKENS>;

  /// `barriers`: 16 bytes, `buffer`: Buffer::MaxBytes(), both shared memory at the same offset in all blocks. `thread`:
  /// number among the 256 threads that call Add().
  __device__ __forceinline__ SplitSum(unsigned char* barriers, unsigned char* buffer, int split,
                                      int thread = int(threadIdx.x) - WARPGROUP)
      : received_(reinterpret_cast<uint64_t*>(barriers)),
        taken_(reinterpret_cast<uint64_t*>(barriers) + 1),
        slots_(reinterpret_cast<uint4*>(buffer)),
        split_(split),
        rank_(split > 1 ? int(ptx::ClusterRank()) : 0),
        own_(Fragments(rank_)),
        thread_(thread) {}

  /// Initialise the barriers. Called by one thread; a cluster barrier must follow before the first Add().
  __device__ __forceinline__ void Init() const {
    if (split_ == 1) return;
    const int receivers = min(split_, Buffer::FRAGMENTS) - (own_ > 0 ? 1 : 0);  // other blocks that finish fragments
    ptx::MbarrierInit(ptx::SharedAddress(received_), 1);
    ptx::MbarrierInit(ptx::SharedAddress(taken_), max(1, receivers * WARPS));
    ptx::MbarrierInitFence();
  }

  /// Add the partial sums `d` of tile number `turn` of this cluster, and call finish(fragment number, sums) for each
  /// fragment that this block finishes. Called by all consumer threads.
  template <typename Finish>
  __device__ __forceinline__ void Add(float (&d)[TOKENS / 2], uint32_t turn, const Finish& finish) const {
    if (split_ == 1) {
#pragma unroll
      for (int j = 0; j < Buffer::FRAGMENTS; ++j) {
        float sum[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
        finish(j, sum);
      }
      return;
    }
    const bool sends = own_ < Buffer::FRAGMENTS;
    if (own_ > 0 && thread_ == 0) {
      ptx::MbarrierArriveExpect(ptx::SharedAddress(received_), (split_ - 1) * own_ * Buffer::SLOT_BYTES);
    }
    if (sends && turn > 0) ptx::MbarrierWait(ptx::SharedAddress(taken_), (turn - 1) % 2);
#pragma unroll
    for (int j = 0; j < Buffer::FRAGMENTS; ++j) {
      const int to = j % split_;
      if (to == rank_) continue;
      const uint4 words = {__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]), __float_as_uint(d[4 * j + 2]),
                           __float_as_uint(d[4 * j + 3])};
      ptx::Send(Slot(j, rank_ < to ? rank_ : rank_ - 1) + thread_, to, words, received_);
    }
    if (own_ == 0) return;
    ptx::MbarrierWait(ptx::SharedAddress(received_), turn % 2);
#pragma unroll
    for (int j = 0; j < Buffer::FRAGMENTS; ++j) {
      if (j % split_ != rank_) continue;
      float sum[4] = {};
      for (int from = 0; from < split_; ++from) {
        uint4 words = {__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]), __float_as_uint(d[4 * j + 2]),
                       __float_as_uint(d[4 * j + 3])};
        if (from != rank_) words = Slot(j, from < rank_ ? from : from - 1)[thread_];
        sum[0] += __uint_as_float(words.x), sum[1] += __uint_as_float(words.y);
        sum[2] += __uint_as_float(words.z), sum[3] += __uint_as_float(words.w);
      }
      finish(j, sum);
    }
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < split_ && lane != rank_) ptx::MbarrierArriveCluster(ptx::SharedAddress(taken_), lane);
  }

 private:
  static constexpr int WARPS = CONSUMERS * WARPGROUP / 32;

  __device__ __forceinline__ int Fragments(int rank) const {
    return rank < Buffer::FRAGMENTS ? (Buffer::FRAGMENTS - 1 - rank) / split_ + 1 : 0;
  }
  /// Return the slots, one per thread, of fragment `j` from the `sender`-th other block, in the block that finishes it.
  __device__ __forceinline__ uint4* Slot(int j, int sender) const {
    return slots_ + (sender * Buffer::OwnFragments(split_) + j / split_) * (CONSUMERS * WARPGROUP);
  }

  uint64_t* const received_;
  uint64_t* const taken_;
  uint4* const slots_;
  const int split_, rank_, own_, thread_;
};

#endif

}  // namespace gemm
}  // namespace flashinfer
