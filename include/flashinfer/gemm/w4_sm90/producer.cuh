// SPDX-License-Identifier: Apache-2.0
// Operands of products with four-bit weights: parameters, and loads by TMA of packed weights, their scales and tokens to a
// ring, 128 of K per stage.
//   stage: tokens (2 slabs of 64 of K, or one of 128 of e4m3) | codes of 64 rows, of 64 more ... (4 strips x 1 KB); scales in an array of their own
//   a load brings codes of all rows, another their scales, others BOX_TOKENS tokens by BOX_SLABS slabs each
#pragma once
#include "../../ptx/elect.cuh"
#include "../sm90/swap_ab_kernel.cuh"
#include "../w4_decode.cuh"
#include "choose.h"

namespace flashinfer {
namespace gemm {

constexpr int W4_BLOCK_K = 128;

/// Slabs of 128 bytes that a token has per stage.
FLASHINFER_HD constexpr int W4Slabs(WeightCode type) { return TakesE4M3(type) ? 1 : 2; }

constexpr int W4_RASTER = 8;                                   // tiles of tokens whose weights are read together
constexpr int W4_GROUP_ROWS = 64;                              // rows of weights of a warpgroup
constexpr int W4_STRIPS = 4;                                   // strips of 16 rows per warpgroup
constexpr int W4_STRIP_WORDS = 256;                            // 4-byte words of a strip per stage
constexpr int W4_CODE_BYTES = W4_STRIPS * W4_STRIP_WORDS * 4;  // per warpgroup and stage

/// Parameters of GemmW4Sm90Kernel. `gemm.weights` is the map of codes.
struct W4Params {
  GemmParams gemm;
  CUtensorMap scales;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Loads of the operands of one tile. Few instructions per stage matter: the warp that issues them is what limits the
/// kernel for few tokens, so that what depends on the tile alone is computed before its stages.
template <typename Traits>
class W4Loads {
 public:
  using Position = hopper::RingPosition<Traits::STAGES>;

  __device__ __forceinline__ W4Loads(const W4Params& params, const hopper::Ring<Traits::STAGES>& ring, uint32_t stages,
                                     uint32_t scales)
      : params_(params), ring_(ring), stages_(stages), scales_(scales), keep_(ptx::PolicyEvictLast()) {
    const uint64_t once = ptx::PolicyEvictFirst(), normal = ptx::PolicyEvictNormal();
    policy_ = params.gemm.read_weights_once ? once : normal;
  }

  __device__ __forceinline__ void SetTile(const Tile& tile) {
    const bool is_gated = params_.gemm.activation.is_active;
    row_ = tile.row, boxes_ = CeilDivide(min(Traits::TOKENS, tile.end_row - tile.row), Traits::BOX_TOKENS);
    // Up and gate columns are half of the rows each, of two entries of the batch; other weights are rows of one
    // (FillW4Params).
    constexpr int BLOCKS = Traits::WEIGHTS / W4_GROUP_ROWS;
    block_ = (is_gated ? BLOCKS / 2 : BLOCKS) * tile.n_tile;
    batch_ = is_gated ? 2 * tile.weight_batch : tile.weight_batch;
    bytes_ = Traits::CODE_BYTES + Traits::SCALE_BYTES + Traits::SLABS * boxes_ * Traits::BOX_TOKENS * SLAB_K_BYTES;
  }

  /// Wait until a stage may be written, and load weights of block kb of K to it. Called by one lane, like LoadTokens().
  __device__ __forceinline__ void LoadWeights(int kb, const Position& at) const {
    const uint32_t full = ring_.BeginFill(at, bytes_);
    ptx::LoadBox(stages_ + at.stage * Traits::STAGE_BYTES + Traits::TOKEN_BYTES, &params_.gemm.weights, full,
                 kb * W4_STRIP_WORDS, block_ * W4_STRIPS, batch_, policy_);
    ptx::LoadBox(scales_ + at.stage * Traits::SCALE_BYTES, &params_.scales, full, kb * (ScaleBytes(Traits::TYPE) / 4),
                 block_, batch_, policy_);
  }

  /// Load the tokens of block kb of K.
  __device__ __forceinline__ void LoadTokens(int kb, const Position& at) const {
    constexpr int BOX_BYTES = Traits::BOX_SLABS * Traits::BOX_TOKENS * SLAB_K_BYTES;
    const uint32_t to = stages_ + at.stage * Traits::STAGE_BYTES, full = ring_.Full(at.stage);
#pragma unroll
    for (int box = 0; box < Traits::TOKENS / Traits::BOX_TOKENS; ++box) {
      if (box > 0 && box >= boxes_) break;
#pragma unroll
      for (int slab = 0; slab < Traits::SLABS; slab += Traits::BOX_SLABS) {
        ptx::LoadBox(to + slab * Traits::SLAB_BYTES + box * BOX_BYTES, &params_.gemm.tokens, full, 0,
                     row_ + box * Traits::BOX_TOKENS, Traits::SLABS * kb + slab, keep_);
      }
    }
  }

 private:
  const W4Params& params_;
  const hopper::Ring<Traits::STAGES> ring_;
  const uint32_t stages_, scales_;
  const uint64_t keep_;
  uint64_t policy_;
  int row_ = 0, boxes_ = 0, block_ = 0, batch_ = 0, bytes_ = 0;
};

/// Load the operands of stages number `producer`, producer + Traits::PRODUCERS, ... of all that the block loads. With `weights_first`, the weights of the first stages are
/// requested before the kernels that this launch depends on have finished.
template <typename Traits>
__device__ __forceinline__ void ProduceW4(const W4Params& params, const hopper::Ring<Traits::STAGES>& ring,
                                          uint32_t stages, uint32_t scales, int producer) {
  constexpr int STEP = Traits::PRODUCERS;
  const GemmParams& p = params.gemm;
  const bool is_leader = ptx::ElectLane();
  W4Loads<Traits> loads(params, ring, stages, scales);
  int early = 0;  // stages of this warp whose weights are under way
  if (p.weights_first) {
    int begun = 0, next = producer;  // stages of the tiles before; K blocks from the tile's first to this warp's next
    hopper::RingPosition<Traits::STAGES> at;
    at.stage = producer;
    ForEachPart<Traits>(p, [&](const TilePart& part, auto&) {
      loads.SetTile(part.tile);
      int kb = part.first + next;
#pragma unroll 1
      for (; kb < part.end && begun + kb - part.first < Traits::STAGES; kb += STEP, at.template Skip<STEP>(), ++early) {
        if (is_leader) loads.LoadWeights(kb, at);
      }
      next = kb - part.end, begun += part.end - part.first;
      return begun < Traits::STAGES;
    });
    ptx::GridDependencyWait();
  }
  int next = producer;  // this and `at`: of the leader
  hopper::RingPosition<Traits::STAGES> at;
  at.stage = producer;
  ForEachPart<Traits>(p, [&](const TilePart& part, auto&) {
    loads.SetTile(part.tile);
    if (is_leader) {
      int kb = part.first + next;
#pragma unroll 1
      for (; kb < part.end && early > 0; kb += STEP, at.template Skip<STEP>(), --early) loads.LoadTokens(kb, at);
#pragma unroll 1
      for (; kb < part.end; kb += STEP, at.template Skip<STEP>()) {
        loads.LoadWeights(kb, at);
        loads.LoadTokens(kb, at);
      }
      next = kb - part.end;
    }
    __syncwarp();
  });
  __syncwarp();
}

/// Rows of one of the warpgroups that share a tile of WEIGHTS weights. Of gated weights, the first half of the warpgroups
/// have the up columns, and the others the gate columns, in the same order.
template <int WEIGHTS>
struct W4Rows {
  static constexpr int PAIRS = WEIGHTS / W4_GROUP_ROWS / 2;
  int group;

  __device__ __forceinline__ int Half() const { return group / PAIRS; }
  __device__ __forceinline__ int Pair() const { return group % PAIRS; }
  /// Return the first column of the results.
  __device__ __forceinline__ int Column(const GemmParams& p, const Tile& tile) const {
    return p.activation.is_active ? (tile.n_tile * PAIRS + Pair()) * W4_GROUP_ROWS
                                  : tile.n_tile * WEIGHTS + group * W4_GROUP_ROWS;
  }
};

/// Scale, activate and store the accumulators of a tile. add(finish) calls finish(index, sums) for each fragment that this
/// block stores. Called by all threads of the warpgroups that have accumulators; `swap`: that of the pair of warpgroups.
template <typename Traits, typename Add>
__device__ __forceinline__ void StoreW4(const GemmParams& p, const Tile& tile, HalvesSwap& swap,
                                        const W4Rows<Traits::WEIGHTS>& rows, const Add& add) {
  const int column = rows.Column(p, tile);
  if (p.activation.is_active) {
    const GateConstants constants(p, tile.weight_batch, 1.f);
    add([&](int j, float (&sum)[4]) {
      if (tile.row + 8 * j >= tile.end_row) return;  // the same in both warpgroups
      StoreGatedTokens(p, sum, swap, constants, rows.Half(), column, tile, tile.row + 8 * j);
    });
  } else {
    const float factor = WeightFactor(p, tile);
    add([&](int j, float (&sum)[4]) {
      if (tile.row + 8 * j >= tile.end_row) return;
      if (Traits::IS_E4M3 && p.token_scale.data != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = tile.row + 8 * j + 2 * (int(threadIdx.x) % 4) + i % 2;
          if (token < tile.end_row) sum[i] *= p.token_scale.data[token];
        }
      }
      StoreTokens(p, sum, factor, column, tile, tile.row + 8 * j);
    });
  }
}

#endif

/// Encode the map of blocks of `block_rows` rows by `words` words of 4 bytes for loads of `box_blocks` blocks and
/// `box_words`. Those are neighbours; of gated weights, half of them are of the first half of an entry of the batch, and
/// half of the second half.
inline cudaError_t EncodeBlocks(CUtensorMap* map, const void* data, int64_t words, int64_t blocks, int block_rows,
                                int64_t batch, int box_words, int box_blocks, bool is_gated) {
  hopper::TensorBox t;
  t.data = data, t.element_bytes = 4, t.swizzle = false;
  const int64_t rows = (is_gated ? blocks / 2 : blocks) * block_rows;
  t.size[0] = words, t.size[1] = rows, t.size[2] = is_gated ? 2 * batch : batch;
  t.stride_bytes[0] = words * 4, t.stride_bytes[1] = words * rows * 4;
  t.box[0] = box_words, t.box[1] = (is_gated ? box_blocks / 2 : box_blocks) * block_rows, t.box[2] = is_gated ? 2 : 1;
  return hopper::FindTensorMap(map, t);
}

/// Encode the map of tokens as (slabs of 128 bytes of columns, rows, columns of a slab), so that one load brings several slabs,
/// one after the other. Elements have `bytes` bytes.
inline cudaError_t EncodeSlabs(CUtensorMap* map, const void* data, int bytes, int64_t columns, int64_t rows,
                               int64_t stride, int box_rows, int box_slabs) {
  const int slab_columns = SLAB_K_BYTES / bytes;
  hopper::TensorBox t;
  t.data = data, t.element_bytes = bytes;
  t.size[0] = slab_columns, t.size[1] = rows, t.size[2] = columns / slab_columns;
  t.stride_bytes[0] = stride * bytes, t.stride_bytes[1] = SLAB_K_BYTES;
  t.box[0] = slab_columns, t.box[1] = box_rows, t.box[2] = box_slabs;
  return hopper::FindTensorMap(map, t);
}

template <typename Traits>
cudaError_t FillW4Params(W4Params* params, const W4Problem& x, const GemmConfig& c) {
  GemmParams* const p = &params->gemm;
  const int64_t k_blocks = x.k / W4_BLOCK_K;
  const bool is_gated = x.activation.is_active;
  constexpr int BYTES = TakesE4M3(Traits::TYPE) ? 1 : 2;
  cudaError_t status = EncodeSlabs(&p->tokens, x.a, BYTES, x.k, x.m, x.a_stride, Traits::BOX_TOKENS, Traits::BOX_SLABS);
  if (status != cudaSuccess) return status;
  const int64_t blocks = x.n / W4_GROUP_ROWS;
  constexpr int BOX_BLOCKS = Traits::WEIGHTS / W4_GROUP_ROWS;
  status = EncodeBlocks(&p->weights, x.b, k_blocks * W4_STRIP_WORDS, blocks, W4_STRIPS, x.weights, W4_STRIP_WORDS,
                        BOX_BLOCKS, is_gated);
  if (status != cudaSuccess) return status;
  constexpr int SCALE_WORDS = ScaleBytes(Traits::TYPE) / 4;
  status = EncodeBlocks(&params->scales, x.codes_scales, k_blocks * SCALE_WORDS, blocks, 1, x.weights, SCALE_WORDS,
                        BOX_BLOCKS, is_gated);
  if (status != cudaSuccess) return status;
  TileParams& t = p->tiles;
  t.groups = x.groups, t.group_count = int(x.batch), t.m = int(x.m), t.grouping = x.grouping;
  t.n_tiles = int(CeilDiv(x.n, Traits::WEIGHTS));
  t.raster = W4_RASTER;
  p->d = x.d, p->d_stride = x.d_stride, p->weight_factors = x.weight_factors, p->activation = x.activation;
  p->token_scale = x.a_scale;
  p->n = int(is_gated ? x.n / 2 : x.n), p->k_blocks = int(k_blocks);
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
  status = device::AllowShared<KERNEL, Traits::SHARED_BYTES>();
  if (status != cudaSuccess) return status;
  const int fitting = device::MaxActiveClusters<KERNEL, Traits::THREADS, Traits::SHARED_BYTES>(config.cluster);
  const int clusters = std::min(fitting, std::max(1, Traits::BLOCKS_PER_SM * config.blocks / config.cluster));
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  const LaunchConfig launch(dim3(clusters * config.cluster), dim3(Traits::THREADS), Traits::SHARED_BYTES,
                            config.enable_pdl, stream, config.cluster);
  return launch.Launch(KERNEL, params);
}

}  // namespace gemm
}  // namespace flashinfer
