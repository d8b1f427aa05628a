// SPDX-License-Identifier: Apache-2.0
// Decode kernel: attention of up to 16 query rows per tile over many keys; also serves small prefills. Bound by reading
// keys and values.
//
// A block of 4 warps runs the items of its share, then takes shares that no block has started. Every warp streams its
// own keys, 16 of each 64 (32 of each 128 where rows are short), through a private ring in shared memory and keeps its
// own maximum, sum and output, so warps never wait for each other; at the end of an item they merge through shared
// memory. Copies run ahead across items: while one item is finished and the query of the next is loaded, the first keys
// of the next are already in flight. Scores and outputs are tensor-core products with keys or columns of values as M
// and 8 or 16 rows of the tile as N; with one row in use that is 1/8 of their work and still 16 times what memory can
// feed.
//
//   keys of an item, 64 a step    warp 0  [16 keys]  copies ──► its ring of stages ──► scores, weights, its own output
//                                 warp 1  [16 keys]  copies ──► its ring of stages ──► scores, weights, its own output
//                                 warp 2  ...                                                     │ end of the item
//                                 warp 3  ...               merge of four outputs in shared memory ◄──┘
//                                                           then to out, or to a slot that the last part merges
//   test  pytest tests/attention      bench  python benchmarks/bench_decode.py
#pragma once
#include "../common/merge.cuh"
#include "consumer.cuh"

namespace flashinfer {
namespace attention {
namespace decode {

/// Run the items of block `block` with SHARED_BYTES of shared memory at `shared`. SINGLE_ITEM: each block has one item,
/// which it computes (ComputedItem), alone or as part of a cluster. IS_TEAM: see Threads.
template <typename Params, typename Variant, int STAGES, bool PAGED, bool ALL_MASKED, bool SINGLE_ITEM = false,
          bool IS_TEAM = false>
__device__ __forceinline__ void DecodeBlock(const Params& p, const WorkList& work, const RowStrides<Params>& strides,
                                            char* shared, int block) {
  using Tr = Traits<Params, STAGES, IS_TEAM>;
  using Team = typename Tr::Team;
  const int warp = __shfl_sync(0xffffffffu, Team::Warp(),
                               0);  // the shuffle tells the compiler that the value is warp-uniform
  const uint32_t ring_address = ptx::SharedAddress(shared) + warp * (STAGES * Tr::STAGE_BYTES);
  char* const q_shared = shared + Tr::RING_BYTES;
  // Exchanged between warps: maxima and sums of rows, buffers of outputs (Finish), exponents of the query, arrivals.
  float* const stats = reinterpret_cast<float*>(q_shared + Tr::Q_BYTES);
  int* const exponents = reinterpret_cast<int*>(stats) + 2 * DECODE_TILE * WARPS + WARPS;
  int* const arrived = reinterpret_cast<int*>(stats + Tr::STATS_BYTES / sizeof(float));
  int* const next_share = arrived + 1;
  const bool in_cluster = SINGLE_ITEM && STAGES > 1 && work.in_clusters;
  WorkItem item =
      SINGLE_ITEM ? ComputedItem<DECODE_TILE, !PAGED>(p, work, block) : FirstItem<DECODE_TILE, !PAGED>(p, work, block);
  const int shares = !SINGLE_ITEM && work.has_shares ? *work.num_items : 0;
  if (!SINGLE_ITEM && item.request < 0) return;
  Producer<Params, Tr, PAGED, SINGLE_ITEM> producer(p, strides, work, item, warp, ring_address);
  int stage = 0;
  while (true) {
    ItemQuery<Params, Variant, Tr> item_query(p, item);
    typename ItemQuery<Params, Variant, Tr>::Query query;
    query.Load(item_query.Reader());
    const bool merges = !in_cluster && work.arrivals != nullptr && item.slot >= 0;
    merge::Parts parts{};
    if (merges) parts = merge::PartsOf<SINGLE_ITEM, !PAGED>(p, work, item);  // loaded early to hide the latency
    // The last item of a share takes the next ticket early, so that copies need not wait for it.
    const bool takes_share = !SINGLE_ITEM && item.next < 0 && shares > work.blocks;
    const int ticket = takes_share && Team::Index() == 0 ? atomicAdd(work.tickets, 1) : 0;
    producer.Fill();  // after the loads of the query, which would otherwise arrive behind all the keys
    // The previous item no longer reads this memory: its last step came before the barriers of its merge.
    item_query.Store(query, q_shared, exponents);
    if (takes_share && Team::Index() == 0) {
      *next_share = work.blocks + ticket < shares ? work.blocks + ticket : -1;
      if (ticket == shares - 1) *work.tickets = 0;  // reset by the last ticket: every block is refused exactly once
    }
    Team::Sync();
    if (takes_share && *next_share >= 0) producer.item.next = item.next = *next_share;
    int free_stage;
    const auto consume = [&](auto halves) {
      Consumer<Params, Variant, Tr, ALL_MASKED, decltype(halves)::value> consumer(item_query);
      consumer.Start(q_shared);
#pragma unroll 1
      for (int token = item.kv_start + warp * Tr::KEYS; token < item.kv_end; token += Tr::STEP) {
        if constexpr (SINGLE_ITEM) {
          ptx::CopyWait<STAGES - 1>();
          __syncwarp();
        } else if constexpr (STAGES == 1) {
          __syncwarp();
          producer.Issue();
          ptx::CopyWait<0>();
          __syncwarp();
        } else {
          ptx::CopyWait<STAGES - 2>();
          __syncwarp();  // the copies of all lanes have landed, and all lanes have read the stage that is overwritten now
          producer.Issue();
        }
        const uint32_t k_tile = ring_address + stage * Tr::STAGE_BYTES;
        consumer.Step(token, k_tile, k_tile + Tr::K_BYTES, ptx::SharedAddress(q_shared));
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        --producer.ahead;
        if constexpr (SINGLE_ITEM) {
          __syncwarp();  // all lanes have read the stage
          producer.Issue();
        }
      }
      // The previous stage is free: it was used last and is refilled only when the next step starts.
      free_stage = in_cluster ? 0 : (stage == 0 ? STAGES - 1 : stage - 1);
      consumer.Finish(work, shared, free_stage, stats, in_cluster ? reinterpret_cast<float*>(q_shared) : nullptr);
    };
    if (item_query.Rows() <= 8) {
      consume(std::integral_constant<int, 1>{});
    } else {
      consume(std::integral_constant<int, DECODE_TILE / 8>{});
    }
    if (in_cluster) {
      merge::MergeInCluster<Params, Variant>(p, item, ptx::SharedAddress(shared) + Tr::STAGE_BYTES,
                                             STAGES * Tr::STAGE_BYTES, ptx::SharedAddress(q_shared));
    } else if (merges) {
      const bool is_last = SINGLE_ITEM || item.next < 0;  // after the last item all stages are free
      const uint32_t buffer = ring_address + (is_last ? 0 : free_stage * Tr::STAGE_BYTES);
      merge::Arrive<Params, Variant, Team>(p, work, item, parts, arrived, buffer,
                                           (is_last ? STAGES : 1) * Tr::STAGE_BYTES);
    }
    if (SINGLE_ITEM || item.next < 0) break;
    item = ListItem(p, work, item.next);
  }
}

template <typename Params, typename Variant, int STAGES, bool PAGED, bool ALL_MASKED, bool SINGLE_ITEM>
__global__ void __launch_bounds__(THREADS, Shape<Params>::BLOCKS)
    DecodeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work,
                 const __grid_constant__ RowStrides<Params> strides) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  DecodeBlock<Params, Variant, STAGES, PAGED, ALL_MASKED, SINGLE_ITEM>(p, work, strides, shared, blockIdx.x);
  ptx::LaunchDependents();
}

template <typename Params, bool PAGED, bool ALL_MASKED, bool SINGLE_ITEM = false>
constexpr auto KernelOf() {
  return DecodeKernel<Params, Variant<ALL_MASKED>, Shape<Params>::STAGES, PAGED, ALL_MASKED, SINGLE_ITEM>;
}

}  // namespace decode

template <typename Params, bool PAGED, bool ALL_MASKED>
int MaxActiveDecodeBlocks() {
  return device::MaxActiveBlocksOf<decode::KernelOf<Params, PAGED, ALL_MASKED>(), decode::THREADS,
                                   decode::Traits<Params, decode::Shape<Params>::STAGES>::SHARED_BYTES>();
}

template <typename Params, bool PAGED, bool ALL_MASKED>
Status LaunchDecode(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.blocks == 0) return cudaSuccess;
  if (!RowsAligned(params)) return cudaErrorMisalignedAddress;
  constexpr int BYTES = decode::Traits<Params, decode::Shape<Params>::STAGES>::SHARED_BYTES;
  const auto launch = [&](auto single_item) {
    return device::LaunchBlocks<decode::KernelOf<Params, PAGED, ALL_MASKED, decltype(single_item)::value>(),
                                decode::THREADS, BYTES>(work.blocks, enable_pdl, stream, params, work,
                                                        RowStrides<Params>(params));
  };
  // Small batches gain from blocks that load only page-table entries before keys (H200, 32 MiB of keys: 20.3 -> 19.0
  // us); large ones, which are read through L2, gain nothing. Where the parts of each tile form a cluster and all
  // clusters are resident, parts do not go through global memory (16 requests of 2048 keys 42.4 -> 41.6 us, one of 1024
  // 9.8 -> 9.2, 4 of 1008 with 16 rows 13.5 -> 11.2).
  if constexpr (!ALL_MASKED) {
    const bool is_computed = work.items == nullptr || work.equal_requests.chunk_size > 0;
    if (is_computed && work.reads_past_cache) {
      constexpr auto KERNEL = decode::KernelOf<Params, PAGED, false, true>();
      const int parts = work.items == nullptr ? work.single_request.chunks : int(work.equal_requests.chunks.divisor);
      if (parts > 1 && decode::Shape<Params>::STAGES > 1 && work.arrivals != nullptr &&
          device::MaxActiveClusters<KERNEL, decode::THREADS, BYTES>(parts) * parts >= work.blocks) {
        WorkList clusters = work;
        clusters.in_clusters = true;
        return LaunchConfig(dim3(work.blocks), dim3(decode::THREADS), BYTES, enable_pdl, stream, parts)
            .Launch(KERNEL, params, clusters, RowStrides<Params>(params));
      }
      return launch(std::true_type{});
    }
  }
  return launch(std::false_type{});
}

}  // namespace attention
}  // namespace flashinfer
