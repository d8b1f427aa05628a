// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90, with e4m3 wgmma and TMA. Formulas and parameters in ../mqa_logits.h.
//
//   one block per SM, persistent over rows i .. i + 1 of the schedule
//
//   producer warpgroup                         consumer warpgroups 0 .. 3: tiles 0, 4, 8, ... of the block; 1, 5, 9, ...
//     warp 0: keys  --TMA, a page a box-->       [64 keys x D] e4m3 (M)  x  [heads of all slots x D] (N)  = products
//             scales                             relu, weight: chains in registers, 3 shuffles, scale, store
//     warps 1-3: queries, weights --cp.async-->  (two requests: the next one arrives while this one is computed)
//
// Keys are read once for all slots. Nothing is merged: each key's score is complete in one warp. Bound by the bytes of the
// keys; for 64 heads of 128, products take a third of that time.
//   test   pytest tests/indexer/test_emulated_mqa_logits.py tests/cuda_compile/test_mqa_logits_sm90.py
//   bench  python benchmarks/bench_indexer.py
#pragma once
#include "../../device/occupancy.cuh"
#include "../../hopper/tensor_map_cache.h"
#include "../../ptx/pdl.cuh"
#include "../../ptx/setmaxnreg.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace flashinfer {
namespace indexer {
namespace sm90 {

/// Tensor maps of the values (D, block_size, pages) and of the scales (block_size, pages).
struct Maps {
  CUtensorMap values, scales;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    MqaLogitsSm90Kernel(const __grid_constant__ MqaLogitsParams p, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char dynamic[];
  const uint32_t address = ptx::SharedAddress(dynamic), base = (address + 1023) / 1024 * 1024;
  const Shared<Shape> shared{base, dynamic + (base - address)};
  if (threadIdx.x == 0) {
    shared.Keys().Init(WARPGROUP / 32);
    shared.Queries().Init(Shape::CONSUMERS * WARPGROUP / 32, LOADER_WARPS * 32);
    ptx::PrefetchTensorMap(&maps.values);
    ptx::PrefetchTensorMap(&maps.scales);
  }
  __syncthreads();
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const int role = __shfl_sync(~0u, int(threadIdx.x) / WARPGROUP, 0);
  if (role == Shape::CONSUMERS) {
    ptx::ReleaseRegisters<Shape::PRODUCER_REGISTERS>();
    if (__shfl_sync(~0u, int(threadIdx.x) / 32 % 4, 0) == 0) {
      ProduceKeys<Shape>(p, shared, &maps.values, &maps.scales);
    } else {
      ProduceQueries<Shape>(p, shared);
    }
  } else {
    ptx::TakeRegisters<Shape::CONSUMER_REGISTERS>();
    Consume<Shape>(p, shared, role);
  }
#endif
}

}  // namespace sm90
}  // namespace indexer

/// Launch the kernel of a shape. What TMA must be able to read is checked by IsReadableByTma.
template <typename Shape>
Status LaunchMqaLogitsSm90(const MqaLogitsParams& p, Stream stream) {
  namespace sm90 = indexer::sm90;
  sm90::Maps maps{};
  hopper::TensorBox values, scales;
  values.data = p.kv, values.element_bytes = 1;
  values.size[0] = uint64_t(p.dim), values.size[1] = uint64_t(p.block_size), values.size[2] = uint64_t(p.pages);
  values.stride_bytes[0] = uint64_t(p.dim), values.stride_bytes[1] = uint64_t(p.kv_stride_page);
  values.box[0] = hopper::SLAB_ROW_BYTES, values.box[1] = std::min<uint32_t>(p.block_size, sm90::KEYS);
  Status status = hopper::FindTensorMap(&maps.values, values);
  if (status != cudaSuccess) return status;
  scales.data = p.kv + int64_t(p.block_size) * p.dim, scales.element_bytes = 4, scales.swizzle = false;
  scales.size[0] = uint64_t(p.block_size), scales.size[1] = uint64_t(p.pages);
  scales.stride_bytes[0] = uint64_t(p.kv_stride_page);
  scales.box[0] = values.box[1];
  status = hopper::FindTensorMap(&maps.scales, scales);
  if (status != cudaSuccess) return status;
  return device::LaunchBlocks<sm90::MqaLogitsSm90Kernel<Shape>, Shape::THREADS, sm90::Shared<Shape>::BYTES>(
      p.blocks, p.enable_pdl, stream, p, maps);
}

}  // namespace flashinfer
