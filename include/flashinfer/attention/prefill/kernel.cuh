// SPDX-License-Identifier: Apache-2.0
// Prefill kernel: attention of many query rows, and heads too large for decode/kernel.cuh. Bound by tensor cores and by
// the shared memory that feeds them.
//
// A block runs one tile of rows; each warp has M_TILES * 16 of them and all keys, so that softmax needs no exchange
// between warps. Where the registers of a warp cannot hold the output of its rows, COLUMN_WARPS warps share them: each
// computes the weights of a part of the keys, which they exchange, and the output of a part of the value columns. Keys
// and values are double buffered: one buffer is filled while the other is used, with one barrier per step. With M_TILES
// = 2 a key fragment feeds two products per load; otherwise reading shared memory (128 B per clock) would take longer
// than the products. Fragments are loaded one step ahead of their products.
//
//   queries ──► warp 0: rows 0 to 15 (31)     per step     K[step] ─┐ scores, softmax in registers
//               warp 1: the next rows                      V[step] ─┴► output rows in registers
//               ...                           two buffers: K, V of step i are used while those of step i + 1 are copied
//   test  pytest tests/attention      bench  python benchmarks/bench_prefill.py
#pragma once
#include "consumer.cuh"

namespace flashinfer {
namespace attention {
namespace prefill {

/// Run the items of block `block` with SHARED_BYTES of shared memory at `shared`.
template <typename Params, typename Variant, int TILE, bool PAGED, bool ALL_MASKED>
__device__ __forceinline__ void PrefillBlock(const Params& p, const WorkList& work, const RowStrides<Params>& strides,
                                             char* shared, int block) {
  using Tr = Traits<Params, TILE>;
  char* const stages = shared + Tr::Q_BYTES;
  auto* const offsets = reinterpret_cast<RowOffsets<Params>*>(stages + Tr::STAGES * Tr::STAGE_BYTES);
  uint8_t* const classes = reinterpret_cast<uint8_t*>(offsets + 2 * Tr::KEYS);
  const uint32_t q_tile = ptx::SharedAddress(shared), ring = ptx::SharedAddress(stages);
  constexpr bool HAS_ITEM_LISTS = TILE == DECODE_TILE;  // larger tiles: one item per block (plan/planner.h)
  int share = block;
  for (WorkItem item = FirstItem<TILE>(p, work, block); item.request >= 0;) {
    Loader<Tr, PAGED> loader(p, strides, item, offsets);
    Consumer<Tr, Variant, ALL_MASKED> consumer(p, item, reinterpret_cast<char*>(classes + Tr::CLASS_BYTES));
    // First token of a step, skipping steps that a custom mask hides entirely.
    MaskClasses mask_classes(classes, item.kv_start, Tr::KEYS);
    if constexpr (ALL_MASKED && HAS_MASK_BITS<Variant>) {
      mask_classes.Classify(consumer.variant.custom_mask_ptr, item, consumer.TokenOf(0), consumer.TokenOf(TILE - 1));
    }
    auto next_step = [&](int token) {
      if constexpr (ALL_MASKED && HAS_MASK_BITS<Variant>) {
        while (token < item.kv_end && mask_classes.IsEmpty(token)) token += Tr::KEYS;
      }
      return token;
    };
    // An iteration computes step `token` while `following` is copied and the page-table entries of the step after it
    // are loaded.
    int token = next_step(item.kv_start), following = next_step(token + Tr::KEYS), buffer = 0;
    loader.AskPage(token);
    consumer.LoadQuery(shared);
    loader.StoreOffset(token, 0);
    loader.AskPage(following);
    if constexpr (Loader<Tr, PAGED>::HAS_TABLE) __syncthreads();
    if constexpr (Tr::ALTERNATES) {
      loader.template Issue<true, false>(token, 0, ring);
    } else {
      loader.template Issue<true, true>(token, 0, ring);
    }
    consumer.Start();
    loader.StoreOffset(following, 1);
    if (Tr::QUERY_STAYS ||
        token >= item.kv_end) {  // without an iteration nothing waits for the query, whose memory the results reuse
      ptx::CopyWait<0>();
      __syncthreads();
      if constexpr (Tr::QUERY_STAYS) consumer.KeepQuery(q_tile);
    }
#pragma unroll 1
    while (token < item.kv_end) {
      const int after = next_step(following + Tr::KEYS);
      loader.AskPage(after);
      ptx::CopyWait<0>();
      __syncthreads();  // keys and values have landed; the other buffer and its offsets are free
      if constexpr (Tr::ALTERNATES) {
        loader.template Issue<false, true>(token, buffer, ring);
      } else if (following < item.kv_end) {
        loader.template Issue<true, true>(following, buffer ^ 1, ring + (buffer ^ 1) * Tr::STAGE_BYTES);
      }
      bool masked = token < consumer.full_begin || token + Tr::KEYS > consumer.full_end;
      if constexpr (ALL_MASKED) {
        if constexpr (HAS_MASK_BITS<Variant>) {
          masked = masked || !mask_classes.IsFull(token) || p.mask_mode == int32_t(MaskMode::kMultiItemScoring);
        } else {
          masked = true;
        }
      }
      const uint32_t k_tile = ring + (Tr::ALTERNATES ? 0 : buffer) * Tr::STAGE_BYTES;
      const uint32_t v_tile = Params::SHARED_KV ? k_tile : k_tile + Tr::K_BYTES;
      float s[Tr::M_TILES][Tr::KEYS_WARP / 8][4];
      const int key0 = token + consumer.key0;
      consumer.Scores(s, key0, q_tile, k_tile + consumer.key0 * Tr::KLayout::PITCH);
      if constexpr (Tr::ALTERNATES) {
        ptx::CopyWait<0>();
        __syncthreads();  // values have landed; keys have been used
        if (following < item.kv_end) loader.template Issue<true, false>(following, buffer ^ 1, ring);
      }
      if (masked) {
        consumer.template Transform<true>(s, key0);
      } else {
        consumer.template Transform<false>(s, key0);
      }
      if constexpr (Variant::use_softmax) consumer.Rebase(s);
      consumer.Values(s, v_tile);
      loader.StoreOffset(after, buffer);  // the step that used this buffer was issued before the barrier above
      token = following;
      following = after;
      buffer ^= 1;
    }
    consumer.Finish(work, shared);
    if (!HAS_ITEM_LISTS || !work.has_shares) break;
    if (item.next < 0 && (share += work.blocks) >= *work.num_items) break;
    item = ListItem(p, work, item.next < 0 ? share : item.next);
    __syncthreads();  // the next item overwrites memory that is read here
  }
}

template <typename Params, typename Variant, int TILE, bool PAGED, bool ALL_MASKED>
__global__ void __launch_bounds__(Traits<Params, TILE>::THREADS, Traits<Params, TILE>::BLOCKS_PER_SM)
    PrefillKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work,
                  const __grid_constant__ RowStrides<Params> strides) {
  extern __shared__ __align__(128) char shared[];
  ptx::GridDependencyWait();
  PrefillBlock<Params, Variant, TILE, PAGED, ALL_MASKED>(p, work, strides, shared, blockIdx.x);
  ptx::LaunchDependents();
}

}  // namespace prefill

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
int MaxActivePrefillBlocks() {
  using Tr = prefill::Traits<Params, TILE>;
  return device::MaxActiveBlocksOf<prefill::PrefillKernel<Params, Variant<ALL_MASKED>, TILE, PAGED, ALL_MASKED>,
                                   Tr::THREADS, Tr::SHARED_BYTES>();
}

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchPrefill(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.blocks == 0) return cudaSuccess;
  if (!RowsAligned(params)) return cudaErrorMisalignedAddress;
  using Tr = prefill::Traits<Params, TILE>;
  return device::LaunchBlocks<prefill::PrefillKernel<Params, Variant<ALL_MASKED>, TILE, PAGED, ALL_MASKED>, Tr::THREADS,
                              Tr::SHARED_BYTES>(work.blocks, enable_pdl, stream, params, work,
                                                RowStrides<Params>(params));
}

}  // namespace attention
}  // namespace flashinfer
