// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90: products and sums over heads. Warpgroup g has every CONSUMERS-th tile of the block; a warp has 16
// keys of a tile, and writes their scores of each slot.
#pragma once
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../sum_heads.cuh"
#include "segments.cuh"

namespace flashinfer {
namespace indexer {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Multiply a tile of keys with WIDTH columns from `pass` * WIDTH on.
template <typename Shape>
__device__ __forceinline__ void Multiply(const Shared<Shape>& shared, int stage, int query, int pass,
                                         float (&products)[Shape::WIDTH / 2]) {
  const uint64_t keys = hopper::DescriptorKMajor(shared.Tile(stage));
  const uint64_t heads = hopper::DescriptorKMajor(shared.Query(query) + pass * Shape::WIDTH * hopper::SLAB_ROW_BYTES);
  ptx::WgmmaPin(products);
  ptx::WgmmaFence();
#pragma unroll
  for (int at = 0; at < Shape::DIM; at += hopper::WGMMA_K_BYTES) {
    const int slab = at / hopper::SLAB_ROW_BYTES, inside = at % hopper::SLAB_ROW_BYTES;
    ptx::Wgmma<ptx::WgmmaType::kE4m3, Shape::WIDTH>::Run(
        products, hopper::AdvanceDescriptor(keys, slab * KEYS * hopper::SLAB_ROW_BYTES + inside),
        hopper::AdvanceDescriptor(heads, slab * Shape::QUERY_SLAB_BYTES + inside), at > 0);
  }
  ptx::WgmmaCommit();
  ptx::WgmmaWait<0>();
  ptx::WgmmaPin(products);
}

/// Compute the tiles of warpgroup `group`.
template <typename Shape>
__device__ __forceinline__ void Consume(const MqaLogitsParams& p, const Shared<Shape>& shared, int group) {
  constexpr int QUADS = Shape::HEADS / CHAINS;  // heads of a chain
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4, chain = lane % 4;
  const int key = 16 * warp + lane / 4 + 8 * (lane % 2);  // the key whose sums this lane has in the end
  const auto ring = shared.Keys();
  const auto queries = shared.Queries();
  hopper::RingPosition<Shape::STAGES> at;
  hopper::RingPosition<QUERY_STAGES> query;
  at.stage = group;  // STAGES is a multiple of CONSUMERS, so this warpgroup always has the same stages
  int turn = group;  // tiles of other warpgroups before the next one of this
  Segments segments(p);
  Segment segment;
  while (segments.Next(segment)) {
    queries.WaitFull(query);
    ptx::FenceAsyncProxy();  // the query was written by cp.async
    const float* const weights = shared.WeightsOf(query.stage) + chain;
    float held[Shape::HOLDS_WEIGHTS ? Shape::COLUMNS / CHAINS : 1];
    if constexpr (Shape::HOLDS_WEIGHTS) {
#pragma unroll
      for (int i = 0; i < Shape::COLUMNS / CHAINS; ++i) held[i] = weights[i * CHAINS];
    }
    const int tiles = segment.Tiles();
    const int64_t first_row = int64_t(segment.request) * Shape::NEXT_N;
    for (; turn < tiles; turn += Shape::CONSUMERS) {
      const int column = segment.begin + turn * KEYS + key;
      float scale = 0.f;
      ring.WaitFull(at);
      scale = shared.ScalesOf(at.stage)[key];
      ChainSums sums;
#pragma unroll
      for (int pass = 0; pass < Shape::PASSES; ++pass) {
        float products[Shape::WIDTH / 2];
        Multiply<Shape>(shared, at.stage, query.stage, pass, products);
        if (pass + 1 == Shape::PASSES) {
          __syncwarp();
          ring.Release(at.stage, 1);
        }
#pragma unroll
        for (int i = 0; i < Shape::WIDTH / CHAINS; ++i) {
          const int quad = pass * Shape::WIDTH / CHAINS + i, j = 4 * (i / 2) + i % 2;
          float weight;
          if constexpr (Shape::HOLDS_WEIGHTS) {
            weight = held[quad];
          } else {
            weight = weights[quad * CHAINS];
          }
          sums.Add(weight, products[j], products[j + 2]);
          if ((quad + 1) % QUADS == 0) {  // the last head of a slot
            const float total = sums.Total() * scale;
            if (chain < 2) StoreScore(p, first_row + quad / QUADS, column, total);
            sums = ChainSums();
          }
        }
      }
      at.template Skip<Shape::CONSUMERS>();
    }
    turn -= tiles;
    queries.Release(query.stage, 1);
    query.Advance();
  }
}

#endif

}  // namespace sm90
}  // namespace indexer
}  // namespace flashinfer
