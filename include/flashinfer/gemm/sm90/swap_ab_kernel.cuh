// SPDX-License-Identifier: Apache-2.0
// GEMM for few tokens: weights are the M side of the tensor cores (64 rows per warpgroup) and tokens the N side, so
// tokens are not padded to 64. Weights stream through a ring that fills shared memory. The blocks of a cluster split K
// of each tile evenly; swap_ab_split_k.cuh adds their partial sums. A block-scaled tile that activates and quantises has
// 256 weights, 128 up columns and their gate columns, and is not split. The warpgroups of a tile of 64 weights share K
// (swap_ab_alternate.cuh). Such a tile may quantise its tokens (swap_ab_quantize.cuh).
// Bound by reading weights.
//
//   producer     warp 0: weights, then tokens by TMA ──► stage: [128 weights x 128 B][TOKENS x 128 B]     full ──►
//                warps 1, 2: block scales, or tokens that they quantise                                ◄── empty
//   consumer 0   weights 0 to 63   x tokens ──► accumulators^T ──┐ cluster: a part of K each, sums exchanged
//   consumer 1   weights 64 to 127 x tokens ──► accumulators^T ──┴► store of transposed fragments, activation
//   64 weights:  consumer 0 takes even stages, consumer 1 odd ones; each finishes half of the tokens
//   test   pytest tests/hopper/test_emulated_gemm.py tests/hopper/test_gemm.py
//   bench  python benchmarks/bench_gemm.py
#pragma once
#include <type_traits>

#include "../../ptx/pdl.cuh"
#include "../../ptx/tma.cuh"
#include "gated.cuh"
#include "mainloop.cuh"
#include "params.cuh"
#include "swap_ab_quantize.cuh"
#include "scales.cuh"
#include "swap_ab_split_k.cuh"
#include "epilogue.cuh"
#include "swap_ab_alternate.cuh"

namespace flashinfer {
namespace gemm {

constexpr int SWAPPED_PRODUCER_REGISTERS = 72;  // 72 * 128 + 216 * 256 = 168 * 384
constexpr int SWAPPED_CONSUMER_REGISTERS = 216;

/// Sizes of an instantiation. QUANTIZES: accumulators are activated and quantised by blocks. ENCODES: tokens are bf16,
/// which the producer quantises.
template <typename T, Scaling SCALING, int TOKENS_, int WEIGHTS_ = SWAPPED_WEIGHTS, bool QUANTIZES_ = false,
          bool ENCODES_ = false>
struct SwappedTraits {
  static constexpr ptx::WgmmaType TYPE = WgmmaTypeOf<T>::TYPE;
  static constexpr bool IS_BLOCK = SCALING == Scaling::kBlock, QUANTIZES = QUANTIZES_, ENCODES = ENCODES_;
  static constexpr bool SHARES_K = WEIGHTS_ == ALTERNATE_WEIGHTS;  // the consumer warpgroups take stages in turn
  static constexpr bool CAN_GATE = QUANTIZES || !(IS_BLOCK || SHARES_K);
  static constexpr int TOKENS = TOKENS_, WEIGHTS = QUANTIZES ? 2 * SCALE_BLOCK : WEIGHTS_;
  static constexpr int BLOCK_K = SLAB_K_BYTES / WgmmaTypeOf<T>::BYTES;
  static constexpr int WEIGHT_BYTES = WEIGHTS * SLAB_K_BYTES, TOKEN_BYTES = TOKENS * SLAB_K_BYTES;
  static constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKEN_BYTES, LOADED_BYTES = ENCODES ? WEIGHT_BYTES : STAGE_BYTES;
  static constexpr int SPLIT_TOKENS = SHARES_K && TOKENS > 8 ? TOKENS / 2 : TOKENS;  // tokens of a consumer
  static constexpr int MAX_SPLIT = SHARES_K ? ALTERNATE_MAX_SPLIT : SplitBuffer<TOKENS>::MAX_SPLIT;
  static constexpr int SPLIT_BYTES = QUANTIZES ? 0 : SplitBuffer<SPLIT_TOKENS>::BytesUpTo(MAX_SPLIT);
  // Exchange between the consumers of a block: accumulators, largest results, or accumulators of gate columns.
  static constexpr int SWAPPED_BYTES = SHARES_K    ? AlternateBuffer<TOKENS>::BYTES
                                       : QUANTIZES ? MaximaBytes(TOKENS)
                                       : IS_BLOCK  ? 0
                                                   : SWAP_BYTES;
  static constexpr int RING_BYTES = MAX_SHARED_BYTES - 1024 - BARRIER_BYTES - SPLIT_BYTES - SWAPPED_BYTES;
  using Scales = StageScales<TOKENS, WEIGHTS, !(QUANTIZES || ENCODES)>;
  static constexpr int SCALE_BYTES = IS_BLOCK ? Scales::BYTES : 0;  // per stage
  static constexpr int ALTERNATES = SHARES_K ? CONSUMERS : 1;       // warpgroups that take stages in turn
  static constexpr int STAGES = RING_BYTES / (STAGE_BYTES + SCALE_BYTES) / ALTERNATES * ALTERNATES;
  static constexpr int SHARED_BYTES =
      1024 + BARRIER_BYTES + STAGES * (STAGE_BYTES + SCALE_BYTES) + SPLIT_BYTES + SWAPPED_BYTES;
  static constexpr int SPLIT_BARRIERS = BARRIER_BYTES - 64;  // byte offset of the barriers of SplitSum
  static_assert(IS_BLOCK || !QUANTIZES, "scales of blocks");
  static_assert(!ENCODES || (IS_BLOCK && SHARES_K && TOKENS == QUANTIZING_TOKENS), "tiles that quantise tokens");
  static_assert(SHARES_K || WEIGHTS_ == SWAPPED_WEIGHTS, "weights of a tile");
  static_assert(2 * STAGES * 8 <= SPLIT_BARRIERS && SCALE_BYTES % 16 == 0 && TOKENS % 8 == 0 && STAGE_BYTES % 1024 == 0,
                "tile shape");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// K blocks [first, end) of a tile that this block sums.
struct TilePart {
  Tile tile;
  int first, end;
};

/// Call body(part, position in the ring) for each tile of this cluster, or until a body that returns bool returns false. The
/// body advances the position once per K block, from stage `first` on by ALTERNATES if these take stages in turn. All
/// lanes of a warp call it together.
template <typename Traits, typename Body>
__device__ __forceinline__ void ForEachPart(const GemmParams& p, const Body& body, int first = 0) {
  const int rank = p.cluster > 1 ? int(ptx::ClusterRank()) : 0, step = int(gridDim.x) / p.cluster;
  hopper::RingPosition<Traits::STAGES> at;
  at.stage = first;
  std::conditional_t<Traits::ENCODES, OneTileOfTokens, TileList<Traits::TOKENS>> list(p.tiles, 0);
  TilePart part;
  part.first = p.k_blocks * rank / p.cluster, part.end = p.k_blocks * (rank + 1) / p.cluster;
  for (int t = int(blockIdx.x) / p.cluster; list.Get(t, part.tile); t += step) {
    if (!part.tile.exists) continue;
    if constexpr (std::is_same_v<decltype(body(part, at)), bool>) {
      if (!body(part, at)) return;
    } else {
      body(part, at);
    }
  }
}

/// Load the operands of each stage: lane 0 calls load_weights(tile, k block, position in the ring), which begins to fill the
/// stage, then load_tokens with the same arguments. With `weights_first`, the weights of the first stages are requested
/// before the kernels that this launch depends on have finished.
template <typename Traits, typename LoadWeights, typename LoadTokens>
__device__ __forceinline__ void ProduceParts(const GemmParams& p, const LoadWeights& load_weights,
                                             const LoadTokens& load_tokens) {
  const bool is_leader = threadIdx.x % 32 == 0;
  int early = 0;  // stages whose weights are under way
  if (p.weights_first) {
    ForEachPart<Traits>(p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
      for (int kb = part.first; kb < part.end && early < Traits::STAGES; ++kb, ++early, at.Advance()) {
        if (is_leader) load_weights(part.tile, kb, at);
      }
      return early < Traits::STAGES;  // a walk over the other tiles would delay the tokens of the first
    });
    ptx::GridDependencyWait();
  }
  ForEachPart<Traits>(p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    for (int kb = part.first; kb < part.end; ++kb, early = max(0, early - 1), at.Advance()) {
      if (!is_leader) continue;
      if (early == 0) load_weights(part.tile, kb, at);
      load_tokens(part.tile, kb, at);
    }
  });
  __syncwarp();
}

template <typename Traits>
__device__ __forceinline__ void ProduceSwapped(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                               uint32_t stages) {
  const uint64_t once = ptx::PolicyEvictFirst(), keep = ptx::PolicyEvictLast();
  const auto load_weights = [&](const Tile& tile, int kb, const hopper::RingPosition<Traits::STAGES>& at) {
    const uint32_t full = ring.BeginFill(at, Traits::LOADED_BYTES), to = stages + at.stage * Traits::STAGE_BYTES;
    const int k = kb * Traits::BLOCK_K, n = tile.n_tile * Traits::WEIGHTS;
    const auto load_box = [&](uint32_t box, int row) {
      if (p.read_weights_once) {
        ptx::LoadBox(box, &p.weights, full, k, row, tile.weight_batch, once);
      } else {
        ptx::LoadBox(box, &p.weights, full, k, row, tile.weight_batch);
      }
    };
    if (Traits::CAN_GATE && p.activation.is_active) {
      load_box(to, n / 2);
      load_box(to + Traits::WEIGHT_BYTES / 2, p.n + n / 2);
    } else {
      load_box(to, n);
    }
  };
  const auto load_tokens = [&](const Tile& tile, int kb, const hopper::RingPosition<Traits::STAGES>& at) {
    if constexpr (Traits::ENCODES) return;  // ProduceQuantized writes them
    const uint32_t to = stages + at.stage * Traits::STAGE_BYTES + Traits::WEIGHT_BYTES;
    ptx::LoadBox(to, &p.tokens, ring.Full(at.stage), kb * Traits::BLOCK_K, tile.row, tile.token_batch, keep);
  };
  ProduceParts<Traits>(p, load_weights, load_tokens);
}

/// Copy the block scales of each stage, or of those of one of two warps that take stages in turn.
template <typename Traits>
__device__ __forceinline__ void ProduceSwappedScales(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                     uint32_t scales) {
  constexpr int ALTERNATES = Traits::ALTERNATES;
  const int first = ALTERNATES > 1 ? int(threadIdx.x) / 32 - 1 : 0;
  int offset = first;  // offset of the first K block of this warp in the tile
  if (p.weights_first) ptx::GridDependencyWait();
  const auto copy_part = [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    const ScaleCopies<Traits::TOKENS, Traits::WEIGHTS, !Traits::QUANTIZES> copies(p, part.tile);
    int kb = part.first + offset;
    for (; kb < part.end; kb += ALTERNATES, Advance<ALTERNATES>(at)) {
      ring.WaitEmpty(at);
      copies.Run(p, scales + at.stage * Traits::SCALE_BYTES, kb);
      ptx::MbarrierArriveCopies(ring.Full(at.stage));
    }
    if (ALTERNATES > 1) offset = kb - part.end;
  };
  ForEachPart<Traits>(p, copy_part, first);
}

/// Quantise the tokens of each stage, by two warps that take stages in turn.
template <typename Traits>
__device__ __forceinline__ void ProduceQuantized(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                 uint32_t stages, uint32_t scales) {
  if (p.weights_first) ptx::GridDependencyWait();
  const auto for_each = [&](int first, const auto& body) { ForEachPart<Traits>(p, body, first); };
  if (p.tiles.m <= 4) {
    ProduceTokenBlocks<Traits, 1>(p, ring, stages, scales, for_each);
  } else {
    ProduceTokenBlocks<Traits, 2>(p, ring, stages, scales, for_each);
  }
}

template <typename Traits>
__device__ __forceinline__ void ConsumeSwapped(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                               uint32_t stages, const float* stage_scales,
                                               const SplitSum<Traits::SPLIT_TOKENS>& split, HalvesSwap swap,
                                               int group) {
  constexpr int TOKENS = Traits::TOKENS;
  const StageOperands from = {hopper::DescriptorKMajor(stages + group * 64 * SLAB_K_BYTES),
                              hopper::DescriptorKMajor(stages + Traits::WEIGHT_BYTES), Traits::STAGE_BYTES};
  const float scale = Traits::IS_BLOCK ? 1.f : TensorScale(p);
  uint32_t turn = 0;
  ForEachPart<Traits>(p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    float acc[1][TOKENS / 2];
    if constexpr (Traits::IS_BLOCK) {
      const int row = group * 64 + int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
      ColumnScales<TOKENS, Traits::Scales::FLOATS> scales(stage_scales + 2 * (threadIdx.x % 4),
                                                          stage_scales + TOKENS + row);
      SumScaledStages<Traits::TYPE, 1, TOKENS>(acc, ring, at, from, part.end - part.first, 1, scales);
    } else {
      SumStages<Traits::TYPE, 1, TOKENS>(acc, ring, at, from, part.end - part.first, 1);
    }
    if (p.cluster > 1 && turn == 0) ptx::ClusterWait();  // barriers of the other blocks are initialised
    if constexpr (!Traits::IS_BLOCK) {
      if (p.activation.is_active) {
        const GateConstants constants(p, part.tile.weight_batch, scale);
        split.Add(acc[0], turn++, [&](int j, float (&sum)[4]) {
          StoreGatedTokens(p, sum, swap, constants, group, part.tile.n_tile * SWAPPED_WEIGHTS / 2, part.tile,
                           part.tile.row + 8 * j);
        });
        return;
      }
    }
    const int column = part.tile.n_tile * SWAPPED_WEIGHTS + group * 64;
    const float factor = scale * WeightFactor(p, part.tile);
    split.Add(acc[0], turn++,
              [&](int j, float (&sum)[4]) { StoreTokens(p, sum, factor, column, part.tile, part.tile.row + 8 * j); });
  });
  if (p.cluster > 1 && turn == 0) ptx::ClusterWait();
}

/// Sum tiles of 64 weights: the warpgroups take stages in turn, add their accumulators, and each finishes half of the tokens.
/// `sums`: SWAPPED_BYTES.
template <typename Traits>
__device__ __forceinline__ void ConsumeAlternate(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                 uint32_t stages, const float* stage_scales,
                                                 const SplitSum<Traits::SPLIT_TOKENS>& split, unsigned char* sums,
                                                 int group) {
  constexpr int TOKENS = Traits::TOKENS, ALTERNATES = Traits::ALTERNATES;
  const StageOperands from = {hopper::DescriptorKMajor(stages), hopper::DescriptorKMajor(stages + Traits::WEIGHT_BYTES),
                              Traits::STAGE_BYTES};
  const float scale = Traits::IS_BLOCK ? 1.f : TensorScale(p);
  AlternateSum<TOKENS> alternate_sum(sums);
  AlternateStages stages_of(group);
  uint32_t turn = 0;
  const auto consume_part = [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    const int k_blocks = stages_of.Count(part.end - part.first);
    float acc[1][TOKENS / 2], own[Traits::SPLIT_TOKENS / 2];
    if constexpr (Traits::IS_BLOCK) {
      const bool is_single = p.weight_scale.rows == 1;  // every row has a scale
      const int row = int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
      ColumnScales<TOKENS, Traits::Scales::FLOATS> scales(
          stage_scales + 2 * (threadIdx.x % 4), stage_scales + TOKENS + (is_single ? row : 0), is_single ? 8 : 0);
      SumScaledStages<Traits::TYPE, 1, TOKENS, ALTERNATES>(acc, ring, at, from, k_blocks, 1, scales);
    } else {
      SumStages<Traits::TYPE, 1, TOKENS, ALTERNATES>(acc, ring, at, from, k_blocks, 1);
    }
    alternate_sum.Add(acc[0], own, group);
    if (p.cluster > 1 && turn == 0) ptx::ClusterWait();  // barriers of the other blocks are initialised
    const int column = part.tile.n_tile * Traits::WEIGHTS;
    const float factor = scale * WeightFactor(p, part.tile);
    split.Add(own, turn++, [&](int i, float (&sum)[4]) {
      const int row = part.tile.row + 8 * AlternateSum<TOKENS>::Fragment(i, group);
      if (row < min(part.tile.row + TOKENS, part.tile.end_row)) StoreTokens(p, sum, factor, column, part.tile, row);
    });
  };
  ForEachPart<Traits>(p, consume_part, group);
  if (p.cluster > 1 && turn == 0) ptx::ClusterWait();
}

/// Sum, activate and quantise tiles of 128 up columns and their gate columns: each warpgroup has 64 of both. `maxima`:
/// SWAPPED_BYTES.
template <typename Traits>
__device__ __forceinline__ void ConsumeGatedBlocks(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                   uint32_t stages, const float* stage_scales, unsigned char* maxima,
                                                   int group) {
  constexpr int TOKENS = Traits::TOKENS;
  const StageOperands from = {hopper::DescriptorKMajor(stages + group * 64 * SLAB_K_BYTES),
                              hopper::DescriptorKMajor(stages + Traits::WEIGHT_BYTES), Traits::STAGE_BYTES};
  GatedColumnScales<TOKENS, Traits::Scales::FLOATS> scales(stage_scales + 2 * (threadIdx.x % 4), stage_scales + TOKENS);
  BlockMaxima<TOKENS> shared_maxima(maxima);
  ForEachPart<Traits>(p, [&](const TilePart& part, hopper::RingPosition<Traits::STAGES>& at) {
    float acc[2][TOKENS / 2];
    SumScaledHalves<Traits::TYPE, TOKENS>(acc, ring, at, from, SCALE_BLOCK * SLAB_K_BYTES, p.k_blocks, scales);
    StoreGatedBlockTokens<TOKENS>(p, acc, shared_maxima, part.tile.n_tile * SCALE_BLOCK, part.tile);
  });
}

#endif

template <typename Traits>
__global__ void __launch_bounds__(GEMM_THREADS, 1) GemmSwappedSm90Kernel(const __grid_constant__ GemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const hopper::AlignedMemory memory = hopper::Aligned(shared);
  const uint32_t base = memory.base;
  unsigned char* const aligned = memory.data;
  const hopper::Ring<Traits::STAGES> ring{base};
  const uint32_t stages = base + BARRIER_BYTES;
  constexpr int SCALES = BARRIER_BYTES + Traits::STAGES * Traits::STAGE_BYTES;
  constexpr int BUFFER = SCALES + Traits::STAGES * Traits::SCALE_BYTES;
  const HalvesSwap swap(aligned + BUFFER + Traits::SPLIT_BYTES);
  const SplitSum<Traits::SPLIT_TOKENS> split(aligned + Traits::SPLIT_BARRIERS, aligned + BUFFER, p.cluster);
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.weights);
    if constexpr (!Traits::ENCODES) ptx::PrefetchTensorMap(&p.tokens);
    constexpr uint32_t PRODUCERS = 1 + (Traits::ENCODES ? hopper::RELEASING_LANES : Traits::IS_BLOCK ? 32 : 0);
    ring.Init(CONSUMERS / Traits::ALTERNATES * WARPGROUP / 32, PRODUCERS);
    split.Init();
  }
  __syncthreads();
  if (p.cluster > 1) ptx::ClusterArriveRelaxed();  // consumers wait before they send the first sums
  if (!p.weights_first) ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint32_t scales = base + SCALES;
  unsigned char* const told = aligned + BUFFER + Traits::SPLIT_BYTES;
  const auto* const stage_scales = reinterpret_cast<const float*>(aligned + SCALES);
  hopper::RunRoles<Traits::ENCODES ? 0 : SWAPPED_PRODUCER_REGISTERS, Traits::ENCODES ? 0 : SWAPPED_CONSUMER_REGISTERS>(
      [&] {
        if (threadIdx.x < 32) {
          ProduceSwapped<Traits>(p, ring, stages);
        } else if (Traits::IS_BLOCK && threadIdx.x < 32 * (1 + Traits::ALTERNATES)) {
          if constexpr (Traits::ENCODES) {
            ProduceQuantized<Traits>(p, ring, stages, scales);
          } else {
            ProduceSwappedScales<Traits>(p, ring, scales);
          }
        }
        __syncwarp();
        if (p.cluster > 1) ptx::ClusterWait();
      },
      [&](int group) {
        if constexpr (Traits::QUANTIZES) {
          ConsumeGatedBlocks<Traits>(p, ring, stages, stage_scales, told, group);
        } else if constexpr (Traits::SHARES_K) {
          ConsumeAlternate<Traits>(p, ring, stages, stage_scales, split, told, group);
        } else {
          ConsumeSwapped<Traits>(p, ring, stages, stage_scales, split, swap, group);
        }
      });
  if (p.cluster > 1) ptx::ClusterSync();  // the other blocks may still write to this one
#endif
}

template <typename T, typename Traits>
Status LaunchSwapped(const GemmProblem& problem, const GemmConfig& config, Stream stream) {
  constexpr int TOKENS = Traits::TOKENS;
  const int k_blocks = int(CeilDiv(problem.k, Traits::BLOCK_K));
  if (config.cluster < 1 || config.cluster > std::min(Traits::MAX_SPLIT, k_blocks)) {
    return cudaErrorInvalidValue;
  }
  GemmParams p{};
  cudaError_t status = FillParams<T>(&p, problem, config, TOKENS, Traits::WEIGHTS);
  if (status != cudaSuccess) return status;
  p.tiles.raster = std::max(1, p.tiles.m_tiles);  // all tokens of one tile of weights, then the next weights
  p.read_weights_once = problem.m <= TOKENS;
  p.weights_first = config.enable_pdl && config.weights_first && (!p.tiles.IsCounted() || config.groups_first);
  constexpr auto* KERNEL = GemmSwappedSm90Kernel<Traits>;
  status = device::AllowShared<KERNEL, Traits::SHARED_BYTES>();
  if (status != cudaSuccess) return status;
  const int fitting = device::MaxActiveClusters<KERNEL, GEMM_THREADS, Traits::SHARED_BYTES>(config.cluster);
  int clusters = std::min(fitting, std::max(1, config.blocks / config.cluster));
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  if (!p.tiles.IsCounted()) clusters = std::min(clusters, p.tiles.Total());
  const LaunchConfig launch(dim3(clusters * config.cluster), dim3(GEMM_THREADS), Traits::SHARED_BYTES,
                            config.enable_pdl, stream, config.cluster);
  return launch.Launch(KERNEL, p);
}

/// Compute d = a b^T with tiles of TOKENS tokens by 128 weights, or by 64 without a gated activation. With block scaling,
/// every row of weights may have a scale; tiles of few tokens activate and quantise by blocks, 128 up columns and 128
/// gate columns of weights with a scale per block. ENCODES: tokens are bf16, and the kernel quantises them.
template <typename T, Scaling SCALING, int TOKENS, int WEIGHTS, bool ENCODES>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return cudaSuccess;
  if (problem.is_unquantized != ENCODES) return cudaErrorInvalidValue;
  if constexpr (WEIGHTS == ALTERNATE_WEIGHTS) {
    if (problem.activation.is_active) return cudaErrorInvalidValue;
  } else if constexpr (SCALING == Scaling::kBlock) {
    if (problem.activation.is_active) {
      if (config.cluster != 1 || problem.b_scale.rows != SCALE_BLOCK || problem.n % (2 * SCALE_BLOCK) != 0 ||
          problem.activation.scales == nullptr) {
        return cudaErrorInvalidValue;
      }
      if constexpr (TOKENS <= GATED_BLOCK_TOKENS) {
        return LaunchSwapped<T, SwappedTraits<T, SCALING, TOKENS, WEIGHTS, true>>(problem, config, stream);
      }
      return cudaErrorInvalidValue;
    }
  }
  return LaunchSwapped<T, SwappedTraits<T, SCALING, TOKENS, WEIGHTS, false, ENCODES>>(problem, config, stream);
}

}  // namespace gemm
}  // namespace flashinfer
