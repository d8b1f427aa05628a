// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows over many keys: decode. Bound by the reading of keys and values.
//
// A block of 4 warps walks the items of its share, and of further ones that no block has begun. Every warp streams its
// own keys, 16 of each 64 (where rows are short 32 of each 128), through a private ring in shared memory and keeps its own
// maximum, sum and output, so that warps never wait for each other; at the end of an item they merge through shared
// memory. The copies run ahead across items: while one is finished and the query of the next is fetched, its first keys
// are already under way. Scores and outputs come from tensor cores with keys or columns of values as M and 8 or 16 rows of
// the tile as N; at one row in use that is 1/8 of their work and still 16 times what memory can feed.
//   test  pytest tests/attention      bench  python benchmarks/bench_decode.py
#pragma once
#include "merge.cuh"
#include "narrow_consumer.cuh"

namespace flashinfer {
namespace attention {
namespace narrow {

/// The items of block `block` of a list, in SHARED_BYTES at `shared`. HAS_ONE: there is one item for each block, which it
/// computes (ComputedItem), alone or as one of a cluster.
template <typename Params, typename Variant, int STAGES, bool PAGED, bool ALL_MASKED, bool HAS_ONE = false>
__device__ __forceinline__ void NarrowBlock(const Params& p, const WorkList& work, const RowStrides<Params>& strides,
                                            char* shared, int block) {
  using Tr = Traits<Params, STAGES>;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);  // tells the compiler that it is uniform
  const uint32_t ring_address = ptx::SharedAddress(shared) + warp * (STAGES * Tr::STAGE_BYTES);
  char* const q_shared = shared + Tr::RING_BYTES;
  // What warps tell each other: maxima and sums of rows and where outputs are (Finish), exponents of the query, arrivals.
  float* const stats = reinterpret_cast<float*>(q_shared + Tr::Q_BYTES);
  int* const exponents = reinterpret_cast<int*>(stats) + 2 * NARROW_TILE * WARPS + WARPS;
  int* const arrived = reinterpret_cast<int*>(stats + Tr::STATS_BYTES / sizeof(float));
  int* const next_share = arrived + 1;
  const bool in_cluster = HAS_ONE && STAGES > 1 && work.in_clusters;
  WorkItem item =
      HAS_ONE ? ComputedItem<NARROW_TILE, !PAGED>(p, work, block) : FirstItem<NARROW_TILE, !PAGED>(p, work, block);
  const int shares = !HAS_ONE && work.has_shares ? *work.num_items : 0;
  if (!HAS_ONE && item.request < 0) return;
  Producer<Params, Tr, PAGED, HAS_ONE> producer(p, strides, work, item, warp, ring_address);
  int stage = 0;
  while (true) {
    ItemQuery<Params, Variant, Tr> item_query(p, item);
    typename ItemQuery<Params, Variant, Tr>::Query query;
    query.Load(item_query.Reader());
    const bool merges = !in_cluster && work.arrivals != nullptr && item.slot >= 0;
    merge::Parts parts{};
    if (merges) parts = merge::PartsOf<HAS_ONE, !PAGED>(p, work, item);  // long before it is needed
    // The last item of a share asks what comes after it, so that copies need not wait for that.
    const bool takes_share = !HAS_ONE && item.next < 0 && shares > work.blocks;
    const int ticket = takes_share && threadIdx.x == 0 ? atomicAdd(work.tickets, 1) : 0;
    producer.Fill();  // after the query was asked for: it would arrive after all the keys
    // The previous item is done with this memory: its last step came before the barriers of its merge.
    item_query.Store(query, q_shared, exponents);
    if (takes_share && threadIdx.x == 0) {
      *next_share = work.blocks + ticket < shares ? work.blocks + ticket : -1;
      if (ticket == shares - 1) *work.tickets = 0;  // the last one of all: each block is refused one
    }
    __syncthreads();
    if (takes_share && *next_share >= 0) producer.item.next = item.next = *next_share;
    int free_stage;
    const auto consume = [&](auto halves) {
      Consumer<Params, Variant, Tr, ALL_MASKED, decltype(halves)::value> consumer(item_query);
      consumer.Start(q_shared);
#pragma unroll 1
      for (int token = item.kv_start + warp * Tr::KEYS; token < item.kv_end; token += Tr::STEP) {
        if constexpr (HAS_ONE) {
          ptx::CopyWait<STAGES - 1>();
          __syncwarp();
        } else if constexpr (STAGES == 1) {
          __syncwarp();
          producer.Issue();
          ptx::CopyWait<0>();
          __syncwarp();
        } else {
          ptx::CopyWait<STAGES - 2>();
          __syncwarp();  // all lanes' copies have landed, and all have read the stage that is overwritten now
          producer.Issue();
        }
        const uint32_t k_tile = ring_address + stage * Tr::STAGE_BYTES;
        consumer.Step(token, k_tile, k_tile + Tr::K_BYTES, ptx::SharedAddress(q_shared));
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        --producer.ahead;
        if constexpr (HAS_ONE) {
          __syncwarp();  // all lanes have read the stage
          producer.Issue();
        }
      }
      // The stage before the next one is free: it was used last, and is filled when the next step starts, if any does.
      free_stage = in_cluster ? 0 : (stage == 0 ? STAGES - 1 : stage - 1);
      consumer.Finish(work, shared, free_stage, stats, in_cluster ? reinterpret_cast<float*>(q_shared) : nullptr);
    };
    if (item_query.Rows() <= 8) {
      consume(std::integral_constant<int, 1>{});
    } else {
      consume(std::integral_constant<int, NARROW_TILE / 8>{});
    }
    if (in_cluster) {
      merge::MergeInCluster<Params, Variant>(p, item, ptx::SharedAddress(shared) + Tr::STAGE_BYTES,
                                             STAGES * Tr::STAGE_BYTES, ptx::SharedAddress(q_shared));
    } else if (merges) {
      const bool is_last = HAS_ONE || item.next < 0;  // then all stages are
      const uint32_t buffer = ring_address + (is_last ? 0 : free_stage * Tr::STAGE_BYTES);
      merge::Arrive<Params, Variant>(p, work, item, parts, arrived, buffer, (is_last ? STAGES : 1) * Tr::STAGE_BYTES);
    }
    if (HAS_ONE || item.next < 0) break;
    item = ListItem(p, work, item.next);
  }
}

template <typename Params, typename Variant, int STAGES, bool PAGED, bool ALL_MASKED, bool HAS_ONE>
__global__ void __launch_bounds__(THREADS, Shape<Params>::BLOCKS)
    NarrowKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work,
                 const __grid_constant__ RowStrides<Params> strides) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  NarrowBlock<Params, Variant, STAGES, PAGED, ALL_MASKED, HAS_ONE>(p, work, strides, shared, blockIdx.x);
  ptx::LaunchDependents();
}

template <typename Params, bool PAGED, bool ALL_MASKED, bool HAS_ONE = false>
constexpr auto KernelOf() {
  return NarrowKernel<Params, Variant<ALL_MASKED>, Shape<Params>::STAGES, PAGED, ALL_MASKED, HAS_ONE>;
}

}  // namespace narrow

template <typename Params, bool PAGED, bool ALL_MASKED>
int ResidentNarrow() {
  return ResidentBlocksOf<narrow::KernelOf<Params, PAGED, ALL_MASKED>(), narrow::THREADS,
                          narrow::Traits<Params, narrow::Shape<Params>::STAGES>::SHARED_BYTES>();
}

template <typename Params, bool PAGED, bool ALL_MASKED>
Status LaunchNarrow(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.blocks == 0) return cudaSuccess;
  if (!RowsAligned(params)) return cudaErrorMisalignedAddress;
  constexpr int BYTES = narrow::Traits<Params, narrow::Shape<Params>::STAGES>::SHARED_BYTES;
  const auto launch = [&](auto has_one) {
    return LaunchBlocks<narrow::KernelOf<Params, PAGED, ALL_MASKED, decltype(has_one)::value>(), narrow::THREADS,
                        BYTES>(work.blocks, enable_pdl, stream, params, work, RowStrides<Params>(params));
  };
  // Small batches gain from blocks that ask for nothing but pages (H200, 32 MiB of keys: 20.3 -> 19.0 us); large ones, which
  // are read through the cache, have nothing to gain. Where the parts of each tile are a cluster, and all clusters run at
  // once, parts do not go through memory (16 requests of 2048 keys 42.4 -> 41.6 us, one of 1024 9.8 -> 9.2, 4 of 1008 with
  // 16 rows 13.5 -> 11.2).
  if constexpr (!ALL_MASKED) {
    const bool is_computed = work.items == nullptr || work.regular.chunk_size > 0;
    if (is_computed && work.reads_past_cache) {
      constexpr auto KERNEL = narrow::KernelOf<Params, PAGED, false, true>();
      const int parts = work.items == nullptr ? work.uniform.chunks : int(work.regular.chunks.divisor);
      if (narrow::Shape<Params>::STAGES > 1 && work.arrivals != nullptr &&
          ResidentClusters<KERNEL, narrow::THREADS, BYTES>(parts) * parts >= work.blocks) {
        WorkList clusters = work;
        clusters.in_clusters = true;
        return LaunchConfig(dim3(work.blocks), dim3(narrow::THREADS), BYTES, enable_pdl, stream, parts)
            .Launch(KERNEL, params, clusters, RowStrides<Params>(params));
      }
      return launch(std::true_type{});
    }
  }
  return launch(std::false_type{});
}

}  // namespace attention
}  // namespace flashinfer
