// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90 with TMA and wgmma: 512 latent columns, and 64 or no rotary ones. Queries have 16 bits, and caches the
// same type or e4m3, which the producer converts. Bound by reading keys, and with many heads by the products of scores and
// outputs.
//
// The decode list of the planner, with tiles of 64 rows, is split over one block per SM. A producer warpgroup loads
// queries and keys of all items of the block (producer.cuh), so that keys of the next item arrive while
// results are written; two consumer warpgroups have half of the output columns each (consumer.cuh).
//
//   producer     query 64 x 576 │ keys of block 0 │ keys of block 1      two buffers of 64 keys, 9 slabs of 64 columns
//                                    │ slab by slab     │                                      full ──►   ◄── empty
//   consumer 0   scores, weights of block 0 ──► shared ──┐   O[:, 0:256]   += weights of both x columns 0 to 255
//   consumer 1   scores, weights of block 1 ──► shared ──┴─► O[:, 256:512] += weights of both x columns 256 to 511
//   test   pytest tests/mla/test_emulated_mla.py tests/cuda_compile/test_mla_sm90.py
//   bench  python benchmarks/bench_mla.py
#pragma once
#include "../../hopper/tensor_map_cache.h"
#include "consumer.cuh"
#include "producer.cuh"
#include "epilogue.cuh"
#include "../../device/occupancy.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

/// Tensor maps of the latent and rotary columns of the cache; unused with cp.async.
struct Maps {
  CUtensorMap latent, rotary;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Compute all items of the block: consumer warpgroup GROUP.
template <int GROUP, bool COPIED, typename Params>
__device__ __forceinline__ void Consume(const Params& p, const WorkList& work, const Shared& shared) {
  Consumer<typename Params::DTypeQ, GROUP, COPIED, (Params::HEAD_DIM_PE > 0)> consumer{
      shared, float(p.sm_scale * 1.44269504088896340736)};
  uint32_t query_parity = 0;
  ItemList<Params> list(p, work);
  for (WorkItem item = list.First(); item.request >= 0;) {
    float o[HALF / 2];
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) o[i] = 0.f;
    RowPair factor = {0.f, 0.f}, lse = {-math::inf, -math::inf};
    if (BlocksOf(item) > 0) {
      RowState state;
      ptx::MbarrierWait(shared.QueryFull(), query_parity);
      ptx::FenceAsyncProxy();  // the query was written by cp.async
      query_parity ^= 1;
      Attend(consumer, o, state, item, Limits(p, item));
      factor = Normalise<GROUP>(shared, state.maximum, state.sum, query_parity, lse);
    }
    if (item.slot >= 0) {
      StorePart<GROUP>(work, item.slot, o, factor, lse);
    } else {
      factor[0] *= p.out_scale, factor[1] *= p.out_scale;
      StoreRows<GROUP>(p, shared, item, o, factor, lse);
    }
    if (!list.Next(item)) break;
  }
}

#endif

template <typename Params, bool COPIED>
__global__ void __launch_bounds__(THREADS, 1)
    MlaSm90Kernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work,
                  const __grid_constant__ RowStrides<Params> strides, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Copying = std::conditional_t<IS_FP8<typename Params::DTypeKV>, ConvertingLoader<Params>, RowLoader<Params>>;
  using Loader = std::conditional_t<COPIED, Copying, BoxLoader<Params>>;
  extern __shared__ char dynamic[];
  const hopper::AlignedMemory memory = hopper::Aligned(dynamic);
  const Shared shared{memory.base, reinterpret_cast<char*>(memory.data)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * SLABS; ++i) ptx::MbarrierInit(shared.Full(i / SLABS, i % SLABS), Loader::ARRIVALS);
    for (int i = 0; i < 2 * SLABS; ++i) ptx::MbarrierInit(shared.Empty(i / SLABS, i % SLABS), WARPGROUP / 32);
    ptx::MbarrierInit(shared.QueryFull(), WARPGROUP);
    ptx::MbarrierInit(shared.QueryEmpty(), 2 * WARPGROUP / 32);
    ptx::MbarrierInitFence();
    if constexpr (!COPIED) {
      ptx::PrefetchTensorMap(&maps.latent);
      ptx::PrefetchTensorMap(&maps.rotary);
    }
  }
  __syncthreads();
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  hopper::RunRoles<PRODUCER_REGISTERS<COPIED>, CONSUMER_REGISTERS<COPIED>>(
      [&] {
        if constexpr (COPIED) {
          Loader loader(p, strides);
          Produce(p, work, shared, loader);
        } else {
          Loader loader(p, maps.latent, maps.rotary);
          Produce(p, work, shared, loader);
        }
      },
      [&](int group) {
        if (group == 0) {
          Consume<0, COPIED>(p, work, shared);
        } else {
          Consume<1, COPIED>(p, work, shared);
        }
      });
#endif
}

/// Encode the map of a cache [pages, page_size, columns] whose boxes are 64 columns by one page or 64 of its keys.
template <typename T>
cudaError_t EncodePages(CUtensorMap* map, const T* data, int columns, const FastDivisor& page_size, int64_t pages,
                        int64_t stride_page, int64_t stride_n) {
  hopper::TensorBox t;
  t.data = data;
  t.size[0] = columns, t.size[1] = page_size.divisor, t.size[2] = uint64_t(std::max<int64_t>(pages, 1));
  t.stride_bytes[0] = stride_n * sizeof(T), t.stride_bytes[1] = stride_page * sizeof(T);
  t.box[0] = SLAB_COLUMNS, t.box[1] = std::min<uint32_t>(page_size.divisor, KEYS);
  return hopper::FindTensorMap(map, t);
}

}  // namespace mla

/// Run the items of `work` on the kernel that copies rows with cp.async (COPIED) or boxes by TMA.
template <typename Params, bool COPIED>
Status LaunchPages(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  mla::Maps maps{};
  if constexpr (!COPIED) {
    Status status = mla::EncodePages(&maps.latent, params.k, mla::LATENT, params.page_size, params.num_pages,
                                     params.k_stride_page, params.k_stride_n);
    if (status != cudaSuccess) return status;
    if constexpr (Params::HEAD_DIM_PE > 0) {
      status = mla::EncodePages(&maps.rotary, params.k_pe, mla::ROTARY, params.page_size, params.num_pages,
                                params.k_pe_stride_page, params.k_pe_stride_n);
      if (status != cudaSuccess) return status;
    }
  }
  return device::LaunchBlocks<mla::MlaSm90Kernel<Params, COPIED>, mla::THREADS, mla::Shared::BYTES>(
      work.blocks, enable_pdl, stream, params, work, RowStrides<Params>(params), maps);
}

/// Number of blocks that the current device runs at once.
template <typename Params>
int MaxActiveMlaSm90Blocks() {
  constexpr bool COPIED = IS_FP8<typename Params::DTypeKV>;  // the only kernel of such a module
  return device::MaxActiveBlocksOf<mla::MlaSm90Kernel<Params, COPIED>, mla::THREADS, mla::Shared::BYTES>();
}

}  // namespace attention
}  // namespace flashinfer
