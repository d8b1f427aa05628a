// SPDX-License-Identifier: Apache-2.0
// Main loop of a consumer warpgroup of the Hopper prefill kernel: 64 rows by all keys of an item, last step first, so
// that steps that cross the diagonal or the end come first.
//
//   scores(last); weigh
//   for each earlier step j:  issue scores(j); issue output += weights(j + 1) values(j + 1); weigh scores(j) meanwhile
//   output += weights(0) values(0)
//
// No product is in flight where the loop branches, and none of the registers of a product is touched before the wait
// for it: otherwise ptxas would serialise all products.
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "items.cuh"
#include "softmax.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// PingPong of the consumer warpgroups: whoever has the turn issues products, the others compute weights. A barrier for
/// each warpgroup: it waits there, its predecessor arrives.
template <typename Tr>
struct PingPong {
  const int group;

  __device__ __forceinline__ void Wait() const {
    if constexpr (Tr::IS_PING_PONG) ptx::BarrierSync(int(NamedBarrier::kTurn) + group, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void Pass() const {
    if constexpr (Tr::IS_PING_PONG) {
      ptx::BarrierArrive(int(NamedBarrier::kTurn) + (group + 1 == Tr::CONSUMERS ? 0 : group + 1), 2 * WARPGROUP);
    }
  }
  /// Give the first turn to the first warpgroup.
  __device__ __forceinline__ void Begin() const {
    if (group == Tr::CONSUMERS - 1) Pass();
  }
};

template <typename Tr>
struct MainLoop {
  static constexpr ptx::WgmmaType SCORE_TYPE = WGMMA_TYPE<typename Tr::T>, VALUE_TYPE = WGMMA_TYPE<typename Tr::W>;
  using Scores = float[Tr::KEYS / 2];
  static constexpr int DEPTH = hopper::WGMMA_K_BYTES / int(sizeof(typename Tr::T));  // columns per product
  using Weights = uint32_t[Tr::KEYS / DEPTH][4];
  using Output = float[Tr::D_VO / 2];

  const Shared<Tr> shared;
  const int group;
  const PingPong<Tr> ping_pong;
  uint32_t count = 0;  // tiles of values used so far; keys are one tile ahead between Weigh and the next IssueScores

  __device__ __forceinline__ MainLoop(const Shared<Tr>& shared, int group)
      : shared(shared), group(group), ping_pong{group} {}

  /// Add all keys of the item to `o`. `release_query` is called once, after the last scores.
  template <typename Rows, typename F>
  __device__ __forceinline__ void Run(Rows& rows, Output& o, const WorkItem& item, int steps, const F& release_query) {
    Scores s;
    Weights w;
    int step = steps - 1, key = item.kv_start + step * Tr::KEYS;
    WaitFull(shared.KeyBarriers(), count);
    ping_pong.Wait();
    IssueScores(s, count);
    ping_pong.Pass();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(s);
    Release(shared.KeyBarriers(), count);
    rows.template Weigh<true>(s, key);  // nothing to rescale yet
    Rows::Round(w, s);
    if (!Tr::ZEROES_ROWS && key + Tr::KEYS > item.kv_len) ClearValues(item.kv_len - key);
#pragma unroll 1
    for (; step > 0; --step) {
      key -= Tr::KEYS;
      if (rows.IsMasked(key)) {
        Step<true>(rows, s, w, o, key);
      } else {
        Step<false>(rows, s, w, o, key);
      }
    }
    release_query();
    WaitFull(shared.ValueBarriers(), count);
    IssueValues(o, w);
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(o);
    Release(shared.ValueBarriers(), count);
    ++count;
  }

 private:
  template <bool MASKED, typename Rows>
  __device__ __forceinline__ void Step(Rows& rows, Scores& s, Weights& w, Output& o, int key) {
    WaitFull(shared.KeyBarriers(), count + 1);
    ping_pong.Wait();
    IssueScores(s, count + 1);
    WaitFull(shared.ValueBarriers(), count);
    IssueValues(o, w);
    ping_pong.Pass();
    ptx::WgmmaWait<1>();
    ptx::WgmmaPin(s);
    Release(shared.KeyBarriers(), count + 1);
    const bool grown = rows.template Weigh<MASKED>(s, key);
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(o);
    Release(shared.ValueBarriers(), count);
    ++count;
    Rows::Round(w, s);
    if (grown) {
#pragma unroll
      for (int i = 0; i < Tr::D_VO / 2; ++i) o[i] *= rows.scale[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void WaitFull(const hopper::Ring<Tr::STAGES>& ring, uint32_t tile) const {
    ring.WaitFull(RingAt<Tr>(tile));
    if constexpr (Tr::GATHERS) ptx::FenceAsyncProxy();  // cp.async writes like ordinary stores
  }
  __device__ __forceinline__ void Release(const hopper::Ring<Tr::STAGES>& ring, uint32_t tile) const {
    ring.Release(RingAt<Tr>(tile).stage, 1);
  }

  /// s = queries of the warpgroup times keys.
  __device__ __forceinline__ void IssueScores(Scores& s, uint32_t tile) const {
    const uint64_t q = hopper::DescriptorKMajor(shared.Query() + group * (64 * hopper::SLAB_ROW_BYTES));
    const uint64_t k = hopper::DescriptorKMajor(shared.Keys(RingAt<Tr>(tile).stage));
    ptx::WgmmaPin(s);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < Tr::D_QK / DEPTH; ++i) {
      const int slab = i / 4, byte = i % 4 * hopper::WGMMA_K_BYTES;
      ptx::Wgmma<SCORE_TYPE, Tr::KEYS>::Run(
          s, hopper::AdvanceDescriptor(q, slab * (Tr::TILE * hopper::SLAB_ROW_BYTES) + byte),
          hopper::AdvanceDescriptor(k, slab * (Tr::KEYS * hopper::SLAB_ROW_BYTES) + byte), i > 0);
    }
    ptx::WgmmaCommit();
  }

  /// o += weights times values.
  __device__ __forceinline__ void IssueValues(Output& o, const Weights& w) const {
    const uint64_t v = hopper::DescriptorMnMajor(shared.Values(RingAt<Tr>(count).stage), Tr::KEYS);
    ptx::WgmmaPin(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < Tr::KEYS / DEPTH; ++i) {
      ptx::Wgmma<VALUE_TYPE, Tr::D_VO, false, true>::Run(
          o, w[i], hopper::AdvanceDescriptor(v, i * DEPTH * hopper::SLAB_ROW_BYTES), true);
    }
    ptx::WgmmaCommit();
  }

  /// Zero the values from row `first` on of the current stage: rows behind the last key of a request are those of
  /// another request or were never written, and a weight of 0 times NaN is NaN. Each warpgroup does it for itself: a
  /// barrier of all would stop the turns.
  __device__ __forceinline__ void ClearValues(int first) const {
    const auto at = RingAt<Tr>(count);
    shared.ValueBarriers().WaitFull(at);
    const int thread = threadIdx.x % WARPGROUP;
    for (int row = first + thread / 8; row < Tr::KEYS; row += WARPGROUP / 8) {
#pragma unroll
      for (int slab = 0; slab < Tr::VO_SLABS; ++slab) {
        ptx::StoreShared16(shared.Values(at.stage) + (slab * Tr::KEYS + row) * hopper::SLAB_ROW_BYTES + thread % 8 * 16,
                           uint4{});
      }
    }
    ptx::FenceAsyncProxy();
    ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group, WARPGROUP);
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
