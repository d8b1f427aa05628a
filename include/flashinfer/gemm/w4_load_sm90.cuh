// SPDX-License-Identifier: Apache-2.0
// Operands of products with four-bit weights: parameters, and loads by TMA of packed weights, their scales and tokens to a
// ring, 128 of K per stage.
//   stage: tokens (2 slabs of TOKENS x 64) | codes of 64 rows, of 64 more (4 strips x 1 KB); scales in an array of their own
#pragma once
#include "swapped_sm90.cuh"
#include "w4_decode.cuh"
#include "w4_sm90.h"

namespace flashinfer {
namespace gemm {

constexpr int W4_BLOCK_K = 128;
constexpr int W4_STRIPS = 4;                                   // strips of 16 rows per warpgroup
constexpr int W4_STRIP_WORDS = 256;                            // 4-byte words of a strip per stage
constexpr int W4_CODE_BYTES = W4_STRIPS * W4_STRIP_WORDS * 4;  // per warpgroup and stage

/// Parameters of GemmW4Sm90Kernel. `gemm.weights` is the map of codes.
struct W4Params {
  GemmParams gemm;
  CUtensorMap scales;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Load the operands of each stage.
template <typename Traits>
__device__ __forceinline__ void ProduceW4(const W4Params& params, const hopper::Ring<Traits::STAGES>& ring,
                                          uint32_t stages, uint32_t scales) {
  const GemmParams& p = params.gemm;
  const bool is_gated = p.activation.is_active;
  const uint64_t once = ptx::PolicyEvictFirst(), keep = ptx::PolicyEvictLast();
  const auto boxes_of = [&](const Tile& tile) {
    return CeilDivide(min(Traits::TOKENS, tile.end_row - tile.row), Traits::BOX_TOKENS);
  };
  const auto load_weights = [&](const Tile& tile, int kb, const hopper::RingPosition<Traits::STAGES>& at) {
    const int tokens = 2 * boxes_of(tile) * Traits::BOX_TOKENS * SLAB_K_BYTES;
    const uint32_t full = ring.BeginFill(at, Traits::CODE_BYTES + Traits::SCALE_BYTES + tokens);
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) {
      // Blocks of 64 rows: ups and gates, or two neighbours.
      const int block = is_gated ? tile.n_tile + g * (p.n / 64) : 2 * tile.n_tile + g;
      const uint32_t to = stages + at.stage * Traits::STAGE_BYTES + Traits::TOKEN_BYTES + g * W4_CODE_BYTES;
      const uint32_t to_scales = scales + at.stage * Traits::SCALE_BYTES + g * ScaleBytes(Traits::TYPE);
      const int scale = kb * (ScaleBytes(Traits::TYPE) / 4);
      if (p.read_weights_once) {
        ptx::LoadBox(to, &p.weights, full, kb * W4_STRIP_WORDS, block * W4_STRIPS, tile.weight_batch, once);
        ptx::LoadBox(to_scales, &params.scales, full, scale, block, tile.weight_batch, once);
      } else {
        ptx::LoadBox(to, &p.weights, full, kb * W4_STRIP_WORDS, block * W4_STRIPS, tile.weight_batch);
        ptx::LoadBox(to_scales, &params.scales, full, scale, block, tile.weight_batch);
      }
    }
  };
  const auto load_tokens = [&](const Tile& tile, int kb, const hopper::RingPosition<Traits::STAGES>& at) {
    const int boxes = boxes_of(tile);
    const uint32_t to = stages + at.stage * Traits::STAGE_BYTES;
#pragma unroll
    for (int slab = 0; slab < 2; ++slab) {
      for (int box = 0; box < boxes; ++box) {
        ptx::LoadBox(to + slab * Traits::SLAB_BYTES + box * Traits::BOX_TOKENS * SLAB_K_BYTES, &p.tokens,
                     ring.Full(at.stage), kb * W4_BLOCK_K + slab * 64, tile.row + box * Traits::BOX_TOKENS, 0, keep);
      }
    }
  };
  ProduceParts<Traits>(p, load_weights, load_tokens);
}

/// Scale, activate and store the sums of a tile. add(finish) calls finish(fragment number, sums) for each fragment that this
/// block stores. Called by all threads of the two warpgroups that have the sums; `group`: number of the warpgroup.
template <WeightCode TYPE, typename Add>
__device__ __forceinline__ void StoreW4(const GemmParams& p, const Tile& tile, HalvesSwap& swap, int group,
                                        const Add& add) {
  constexpr float LEFT_OUT = LeftOutFactor(TYPE);
  if (p.activation.is_active) {
    const GateConstants constants(p, tile.weight_batch, LEFT_OUT);
    add([&](int j, float (&sum)[4]) {
      if (tile.row + 8 * j >= tile.end_row) return;  // the same in both warpgroups
      StoreGatedTokens(p, sum, swap, constants, group, tile.n_tile * SWAPPED_WEIGHTS / 2, tile, tile.row + 8 * j);
    });
  } else {
    const int column = tile.n_tile * SWAPPED_WEIGHTS + group * 64;
    const float factor = LEFT_OUT * WeightFactor(p, tile);
    add([&](int j, float (&sum)[4]) {
      if (tile.row + 8 * j < tile.end_row) StoreTokens(p, sum, factor, column, tile, tile.row + 8 * j);
    });
  }
}

#endif

/// Encode the map of (batch, rows, words) of 4 bytes, with boxes of `box_words` by `box_rows`.
inline cudaError_t EncodeWords(CUtensorMap* map, const void* data, int64_t words, int64_t rows, int64_t batch,
                               int box_words, int box_rows) {
  hopper::TensorBox t;
  t.data = data, t.element_bytes = 4, t.swizzle = false;
  t.size[0] = words, t.size[1] = rows, t.size[2] = batch;
  t.stride_bytes[0] = words * 4, t.stride_bytes[1] = words * rows * 4;
  t.box[0] = box_words, t.box[1] = box_rows;
  return hopper::FindTensorMap(map, t);
}

template <typename Traits>
cudaError_t FillW4Params(W4Params* params, const W4Problem& x, const GemmConfig& c) {
  GemmParams* const p = &params->gemm;
  const int64_t k_blocks = x.k / W4_BLOCK_K;
  cudaError_t status =
      EncodeMatrix(&p->tokens, x.a, 2, x.k, x.m, x.a_stride, 1, 0, SLAB_K_BYTES / 2, Traits::BOX_TOKENS);
  if (status != cudaSuccess) return status;
  status = EncodeWords(&p->weights, x.b, k_blocks * W4_STRIP_WORDS, x.n / 16, x.weights, W4_STRIP_WORDS, W4_STRIPS);
  if (status != cudaSuccess) return status;
  constexpr int SCALE_WORDS = ScaleBytes(Traits::TYPE) / 4;
  status = EncodeWords(&params->scales, x.codes_scales, k_blocks * SCALE_WORDS, x.n / 64, x.weights, SCALE_WORDS, 1);
  if (status != cudaSuccess) return status;
  TileParams& t = p->tiles;
  t.groups = x.groups, t.group_count = int(x.batch), t.m = int(x.m), t.grouping = x.grouping;
  t.n_tiles = int(x.n / SWAPPED_WEIGHTS);
  p->d = x.d, p->d_stride = x.d_stride, p->weight_factors = x.weight_factors, p->activation = x.activation;
  p->n = int(x.activation.is_active ? x.n / 2 : x.n), p->k_blocks = int(k_blocks);
  p->cluster = c.cluster, p->out = x.out;
  p->read_weights_once = x.m <= x.batch * Traits::TOKENS;
  p->weights_first = c.enable_pdl && c.weights_first && c.groups_first;
  return cudaSuccess;
}

/// Launch KERNEL for a problem that GemmW4Sm90() has checked.
template <typename Traits, auto KERNEL>
cudaError_t LaunchW4(const W4Problem& problem, const GemmConfig& config, cudaStream_t stream) {
  if (config.cluster < 1 || config.cluster > std::min<int64_t>(Traits::MAX_SPLIT, problem.k / W4_BLOCK_K)) {
    return cudaErrorInvalidValue;
  }
  W4Params params{};
  cudaError_t status = FillW4Params<Traits>(&params, problem, config);
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> allowed{0};
  auto* kernel = KERNEL;
  status = AllowShared(kernel, Traits::SHARED_BYTES, &allowed);
  if (status != cudaSuccess) return status;
  const int fitting = MaxClusters<KERNEL, Traits::THREADS>(Traits::SHARED_BYTES, config.cluster);
  const int clusters = std::min(fitting, std::max(1, Traits::BLOCKS_PER_SM * config.blocks / config.cluster));
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  const LaunchConfig launch(dim3(clusters * config.cluster), dim3(Traits::THREADS), Traits::SHARED_BYTES,
                            config.enable_pdl, stream, config.cluster);
  return launch.Launch(kernel, params);
}

}  // namespace gemm
}  // namespace flashinfer
