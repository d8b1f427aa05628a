// SPDX-License-Identifier: Apache-2.0
// Prefill kernel for Hopper: a persistent kernel of one producer and two or three consumer warpgroups on wgmma and TMA.
// Bound by tensor cores, and for short rows of keys by the exponentials of softmax.
//
// A block takes items (tile of rows, range of keys) from a list until none is left. The producer fills a ring of key
// tiles and a ring of value tiles; each consumer warpgroup has 64 rows of the tile and all keys, so that softmax needs
// no exchange between warpgroups. Products of one step and softmax of another overlap within a warpgroup, and the
// warpgroups take turns, so that one multiplies while another computes weights (mainloop.cuh).
//
//   producer      items.cuh ──► Q tile │ K ring of stages │ V ring of stages       full ──►   ◄── empty
//                               128 (192) rows, 64 of each consumer
//   consumer 0    S = Q K (step i + 1) │ O += P V (step i) │ softmax of step i + 1 │ S = ...   ──► epilogue.cuh
//   consumer 1            softmax      │ S = Q K           │ O += P V ...                      ──► epilogue.cuh
//   test   pytest tests/attention/test_emulated_prefill.py tests/cuda_compile/test_prefill_sm90.py
//   bench  python benchmarks/bench_prefill.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "mainloop.cuh"
#include "producer_convert.cuh"
#include "epilogue.cuh"
#include "mainloop_fp8.cuh"
#include "producer.cuh"
#include "query.cuh"
#include "producer_transpose.cuh"
#include "producer_transpose_boxes.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Tr>
__device__ __forceinline__ void RunProducer(const typename Tr::Params& p, const WorkList& work, const Boxes& boxes,
                                            const RowStrides<typename Tr::Params>& strides, const Shared<Tr>& shared) {
  if constexpr (Tr::TRANSPOSES && Tr::GATHERS) {
    TransposeProducer<Tr> producer(p, boxes, strides, shared);
    Produce<Tr>(p, work, shared, producer);
  } else if constexpr (Tr::TRANSPOSES) {
    BoxTransposeProducer<Tr> producer(p, boxes, shared);
    Produce<Tr>(p, work, shared, producer);
  } else if constexpr (Tr::CONVERTS) {
    ConvertProducer<Tr> producer(p, boxes, strides, shared);
    Produce<Tr>(p, work, shared, producer);
    producer.Finish();
  } else if constexpr (Tr::GATHERS) {
    GatherProducer<Tr> producer(p, boxes, strides, shared);
    Produce<Tr>(p, work, shared, producer);
  } else if (threadIdx.x < 32 * Tr::ISSUERS) {
    BoxProducer<Tr> producer(p, boxes, shared);
    Produce<Tr>(p, work, shared, producer);
  }
}

template <typename Tr, bool ALL_MASKED, bool IS_FP8 = Tr::TRANSPOSES>
struct MainLoopOf {
  using Type = MainLoop<Tr>;
};
/// Masks of pairs leave no registers for queries.
template <typename Tr, bool ALL_MASKED>
struct MainLoopOf<Tr, ALL_MASKED, true> {
  using Type = Fp8MainLoop<Tr, Tr::HOLDS_QUERY && !ALL_MASKED>;
};

template <typename Tr, typename Variant, bool ALL_MASKED>
__device__ __forceinline__ void RunConsumer(const typename Tr::Params& p, const WorkList& work, const Boxes& boxes,
                                            const Shared<Tr>& shared, int group) {
  using Rows = Softmax<Tr, Variant, ALL_MASKED>;
  typename MainLoopOf<Tr, ALL_MASKED>::Type loop(shared, group);
  hopper::RingPosition<1> q_at;
  const hopper::Ring<1> query = shared.QueryBarriers();
  const int warp = int(threadIdx.x) % WARPGROUP / 32;
  loop.ping_pong.Begin();
  ItemReader<Tr> items(shared);
  WorkItem item;
  while (items.Next(item)) {
    const int steps = StepsOf<Tr::KEYS>(item);
    const bool is_boxed = boxes.has_query && steps > 0;
    Rows rows(p, item, group);
    auto release = [&] {
      if (is_boxed) query.Release(0, 1);
    };
    float o[Tr::D_VO / 2];
#pragma unroll
    for (int i = 0; i < Tr::D_VO / 2; ++i) o[i] = 0.f;
    if (steps > 0) {
      if (is_boxed) {
        query.WaitFull(q_at);
        q_at.Advance();
      } else {
        CopyQuery<Tr>(p, rows.variant, item, shared, group);
      }
      if constexpr (Tr::SCALES_QUERY) rows.ScaleBy(ScaleQuery<Tr>(shared, group));
      loop.Run(rows, o, item, steps, [&] {
        if (!Tr::STAGES_IN_QUERY) release();
      });
    }
    // Warps stage results where other warps of the warpgroup may still read queries, or have their own memory.
    if constexpr (Tr::STAGES_IN_QUERY) ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group, WARPGROUP);
    Epilogue<Tr, Rows, Variant>{p, work, item, rows, shared.Staging(4 * group + warp)}.Write(o);
    if constexpr (Tr::STAGES_IN_QUERY) {
      ptx::FenceAsyncProxy();
      release();
      ptx::BarrierSync(int(NamedBarrier::kWarpgroup) + group,
                       WARPGROUP);  // before this warpgroup copies the next query
    }
  }
}

/// Run the items that this block takes, in SHARED_BYTES of shared memory at `memory`.
template <typename Tr, typename Variant, bool ALL_MASKED>
__device__ __forceinline__ void RunBlock(const typename Tr::Params& p, const WorkList& work, const Boxes& boxes,
                                         const RowStrides<typename Tr::Params>& strides, char* memory) {
  const Shared<Tr> shared{hopper::Aligned(memory).base};
  if (threadIdx.x == 0) shared.Init();
  __syncthreads();
  ptx::GridDependencyWait();
  hopper::RunRoles<Tr::PRODUCER_REGISTERS, Tr::CONSUMER_REGISTERS>(
      [&] { RunProducer<Tr>(p, work, boxes, strides, shared); },
      [&](int group) { RunConsumer<Tr, Variant, ALL_MASKED>(p, work, boxes, shared, group); });
  ptx::LaunchDependents();
}

#endif

template <typename Tr, typename Variant, bool ALL_MASKED>
__global__ void __launch_bounds__(Tr::THREADS, Tr::BLOCKS)
    PrefillSm90Kernel(const __grid_constant__ typename Tr::Params p, const __grid_constant__ WorkList work,
                      const __grid_constant__ Boxes boxes,
                      const __grid_constant__ RowStrides<typename Tr::Params> strides) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  RunBlock<Tr, Variant, ALL_MASKED>(p, work, boxes, strides, memory);
#endif
}

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
