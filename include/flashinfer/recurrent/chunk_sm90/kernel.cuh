// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90, second kernel: the chunks of a request, one after another, with the state in registers.
//
//   a block: producer thread --TMA--> ring of 3 stages: keys, queries, values, prepared block of a chunk
//                                        |
//            warpgroup 0: rows  0 ..  63 of the state S^T [V x K], 64 registers a thread, all chunks
//            warpgroup 1: rows 64 .. 127 (or another block, where there are fewer than one head per two SMs)
//
// A warpgroup is alone with its rows: products follow each other through registers (consumer.cuh), without shared memory and
// without barriers between warps. Bound by the chain of products of a chunk: 1,024 cycles of the tensor cores for 64 rows.
//   test  pytest tests/recurrent/test_emulated_gdn_prefill.py      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "../../ptx/setmaxnreg.cuh"
#include "consumer.cuh"
#include "producer.cuh"
#include "split.cuh"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Set the outputs of a request without a state to 0.
template <typename Shape, typename T>
__device__ __forceinline__ void ClearOutputs(const DeltaParams<T>& p, const Item& item) {
  constexpr int PIECES = Shape::WARPGROUPS * HALF / 8;  // 16 bytes
  for (int64_t i = threadIdx.x; i < item.tokens.length * PIECES; i += Shape::THREADS) {
    T* const row = p.o + ((item.tokens.begin + i / PIECES) * p.num_heads + item.head) * DIM + item.column;
    reinterpret_cast<uint4*>(row)[i % PIECES] = uint4{};
  }
}

#endif

template <typename T, typename Shape, Pass PASS>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    ScanChunksSm90Kernel(const __grid_constant__ DeltaParams<T> p, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char dynamic[];
  const Shared<Shape> shared{(ptx::SharedAddress(dynamic) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    shared.Ring().Init(Shape::CONSUMERS / 32);
    if constexpr (!Shape::CHANNEL_DECAY) {
      ptx::PrefetchTensorMap(&maps.q);
      ptx::PrefetchTensorMap(&maps.k);
    }
    ptx::PrefetchTensorMap(&maps.v);
    ptx::PrefetchTensorMap(&maps.o);
  }
  __syncthreads();
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  Item item;
  if constexpr (PASS == Pass::kWhole) {
    item = ItemOf<Shape>(p);
  } else if constexpr (PASS == Pass::kParts) {
    item = PartOf<Shape>(p);
  } else {
    item = TransferOf(p);
  }
  if (item.tokens.length == 0) return;
  if constexpr (Shape::CHANNEL_DECAY) {
    if (item.initial_slot < 0) {
      ClearOutputs<Shape>(p, item);
      return;
    }
  }
  const int role = __shfl_sync(~0u, int(threadIdx.x) / WARPGROUP, 0);
  if (role == Shape::WARPGROUPS) {
    if constexpr (Shape::WARPGROUPS > 1) ptx::ReleaseRegisters<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x == Shape::CONSUMERS) {
      if constexpr (Shape::CHANNEL_DECAY) {
        ProduceScaled<Shape>(p, maps, item, shared);
      } else {
        Produce<Shape, PASS == Pass::kTransfer>(p, maps, item, shared);
      }
    }
  } else {
    if constexpr (Shape::WARPGROUPS > 1) ptx::TakeRegisters<Shape::CONSUMER_REGISTERS>();
    Consume<T, Shape, PASS>(p, maps, item, shared);
  }
#endif
}

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
