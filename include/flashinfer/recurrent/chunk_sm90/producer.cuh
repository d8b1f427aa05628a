// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90: loads. One thread fills the ring of stages by TMA.
#pragma once
#include "../../ptx/tma.cuh"
#include "passes.h"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// TRANSFER: load only what changes the state (split.cuh).
template <typename Shape, bool TRANSFER, typename Params>
__device__ __forceinline__ void Produce(const Params& p, const Maps& maps, const Item& item,
                                        const Shared<Shape>& shared) {
  const auto ring = shared.Ring();
  const int q_head = item.head / (p.num_heads / p.num_q_heads), k_head = item.head / (p.num_heads / p.num_k_heads);
  const int v_head = item.head / (p.num_heads / p.num_v_heads), chunks = item.Chunks();
  const int64_t first = FirstChunkSlot(item.number, item.tokens.begin - item.passed) + item.passed / CHUNK;
  const char* block = p.blocks + (first * p.num_heads + item.head) * BLOCK_BYTES;
  int token = int(item.tokens.begin);
  hopper::RingPosition<Shape::STAGES> at;
  for (int i = 0; i < chunks; ++i) {
    const uint32_t full = ring.BeginFill(at, Shape::LOADED_BYTES - (TRANSFER ? 2 * SLAB_BYTES : 0));
#pragma unroll
    for (int slab = 0; slab < 2; ++slab) {
      ptx::LoadBox(shared.Keys(at.stage) + slab * SLAB_BYTES, &maps.k, full, slab * HALF, k_head, token);
    }
#pragma unroll
    for (int group = 0; group < Shape::WARPGROUPS; ++group) {
      ptx::LoadBox(shared.Values(at.stage, group), &maps.v, full, item.column + group * HALF, v_head, token);
    }
    ptx::LoadBulk(shared.Block(at.stage), block, BLOCK_BYTES, full);
    if constexpr (!TRANSFER) {
#pragma unroll
      for (int slab = 0; slab < 2; ++slab) {
        ptx::LoadBox(shared.Queries(at.stage) + slab * SLAB_BYTES, &maps.q, full, slab * HALF, q_head, token);
      }
    }
    block += int64_t(p.num_heads) * BLOCK_BYTES;
    token += CHUNK;
    at.Advance();
  }
}

/// Load what kda_prepare.cuh has left for each chunk, and the values.
template <typename Shape, typename Params>
__device__ __forceinline__ void ProduceScaled(const Params& p, const Maps& maps, const Item& item,
                                              const Shared<Shape>& shared) {
  const auto ring = shared.Ring();
  const int v_head = item.head / (p.num_heads / p.num_v_heads), chunks = item.Chunks();
  const char* block =
      p.blocks + (FirstChunkSlot(item.number, item.tokens.begin) * p.num_heads + item.head) * KDA_BLOCK_BYTES;
  int token = int(item.tokens.begin);
  hopper::RingPosition<Shape::STAGES> at;
  for (int i = 0; i < chunks; ++i) {
    const uint32_t full = ring.BeginFill(at, Shape::LOADED_BYTES);
    ptx::LoadBulk(shared.Keys(at.stage), block, KDA_LISTS_AT, full);
    ptx::LoadBulk(shared.Lists(at.stage), block + KDA_LISTS_AT, KDA_LISTS_BYTES, full);
#pragma unroll
    for (int group = 0; group < Shape::WARPGROUPS; ++group) {
      ptx::LoadBox(shared.Values(at.stage, group), &maps.v, full, item.column + group * HALF, v_head, token);
    }
    block += int64_t(p.num_heads) * KDA_BLOCK_BYTES;
    token += CHUNK;
    at.Advance();
  }
}

#endif

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
