// SPDX-License-Identifier: Apache-2.0
// GEMM with tokens on the M side: a persistent kernel of one producer and two consumer warpgroups. Bound by wgmma;
// block scales by the additions of fp32 accumulators beside it.
//
// Warp 0 of the producer loads stages of 128 bytes of K into the ring, warp 1 their block scales; tokens that are
// gathered are copied by warps 2 and 3 (gather.cuh). Each consumer warpgroup multiplies and stores its own part of the
// tile, so that one warpgroup multiplies while the other stores. Two blocks of a cluster may share one operand: each
// block loads half of the operand and multicasts that half to both blocks; or the blocks of a cluster split K
// (split_k.cuh). tiles.cuh defines the order of tiles.
//
//   producer     warp 0: A and B boxes by TMA ──► stage: [A BLOCK_M x 128 B][B BLOCK_N x 128 B]  3 to 8 stages
//                warp 1: block scales           ──► scales of the stage            full ──►   ◄── empty
//                warps 2, 3: gathered rows of A
//   consumer 0   rows 0 to BLOCK_M / 2 ──► accumulators ──► epilogue.cuh, gated.cuh, split_k.cuh
//   consumer 1   rows BLOCK_M / 2 on   ──► accumulators ──► the same            (128 x 256 block-scaled: in two halves)
//   test   pytest tests/hopper/test_emulated_gemm.py tests/hopper/test_gemm.py
//   bench  python benchmarks/bench_gemm.py, and of every tile python -m tests.hopper.tune
#pragma once
#include "../../ptx/cluster.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/tma.cuh"
#include "columns.h"
#include "gated.cuh"
#include "gather.cuh"
#include "mainloop.cuh"
#include "params.cuh"
#include "scales.cuh"
#include "split_k.cuh"
#include "epilogue.cuh"
#include "tile_queue.cuh"

namespace flashinfer {
namespace gemm {

/// Sizes of one instantiation. The tile is split between the two consumer warpgroups along M. A warpgroup sums WAVES times
/// 64 rows by GROUP_N columns: further rows, or, for a 128 x 256 tile with block scales, the second half of the columns.
/// With block scales and 64 rows, the columns are multiplied in PARTS parts, which take turns in two scratch accumulators.
template <typename T, Scaling SCALING, int BLOCK_M_, int BLOCK_N_, Form FORM>
struct GemmTraits {
  static constexpr ptx::WgmmaType TYPE = WgmmaTypeOf<T>::TYPE;
  static constexpr bool IS_BLOCK = SCALING == Scaling::kBlock, GATHERS = FORM == Form::kGather;
  static constexpr bool SPLITS = FORM == Form::kSplit;
  static constexpr int FOLLOWERS = (IS_BLOCK ? 1 : 0) + (GATHERS ? GATHER_WARPS : 0);  // producer warps after warp 0
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_;
  static constexpr bool IN_HALVES = IS_BLOCK && BLOCK_M == 128 && BLOCK_N == 256;
  static constexpr int PARTS = !IS_BLOCK || BLOCK_M != 128 || BLOCK_N < 128 ? 0 : IN_HALVES ? 4 : 2;
  static constexpr int GROUP_M = BLOCK_M / 2, GROUP_N = IN_HALVES ? BLOCK_N / 2 : BLOCK_N;
  static constexpr int WAVES = IN_HALVES ? 2 : GROUP_M / 64;  // halves of 128 columns, or rows of 64
  static constexpr bool CAN_GATE = CanGate(IS_BLOCK, false, BLOCK_M, BLOCK_N);
  static constexpr int BLOCK_K = SLAB_K_BYTES / WgmmaTypeOf<T>::BYTES;
  static constexpr int A_BYTES = BLOCK_M * SLAB_K_BYTES, B_BYTES = BLOCK_N * SLAB_K_BYTES;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES, LOADED_BYTES = GATHERS ? B_BYTES : STAGE_BYTES;
  using Columns = TileColumns<BLOCK_N>;
  static constexpr int HEAD_BYTES = Columns::HEAD * SLAB_K_BYTES, TAIL_BYTES = Columns::TAIL * SLAB_K_BYTES;
  using Scales = StageScales<BLOCK_M, BLOCK_N, false>;
  static constexpr int SCALE_BYTES = IS_BLOCK ? Scales::BYTES : 0;  // per stage
  static constexpr int STAGING_BYTES = CONSUMERS * WARPGROUP / 32 * 2048;
  static constexpr int RING_BYTES = MAX_SHARED_BYTES - 1024 - BARRIER_BYTES - STAGING_BYTES;
  static constexpr int STAGES = std::min(8, RING_BYTES / (STAGE_BYTES + SCALE_BYTES));
  static constexpr int SHARED_BYTES = 1024 + BARRIER_BYTES + STAGES * (STAGE_BYTES + SCALE_BYTES) + STAGING_BYTES;
  static_assert(GROUP_M % 64 == 0 && (GROUP_N % 64 == 0 || Columns::HAS_TAIL) && STAGES >= 3, "tile shape");
  static_assert(!Columns::HAS_TAIL || (PARTS > 0 && !GATHERS), "tiles that have a tail");
  static_assert(!IS_BLOCK || GROUP_N <= SCALE_BLOCK || WAVES == 1, "two waves share the scale of the weights");
  static_assert(!GATHERS || PARTS > 0, "tiles that gather");
  static_assert(!SPLITS || (PARTS == 2 && !Columns::HAS_TAIL), "tiles that split K");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Load the weights of a stage to `b`.
template <typename Traits>
__device__ __forceinline__ void LoadWeights(const GemmParams& p, uint32_t b, uint32_t full, int k, const Tile& tile) {
  using Columns = typename Traits::Columns;
  ptx::LoadBox(b, &p.weights, full, k, Columns::Head(tile.n_tile), tile.weight_batch);
  if constexpr (Columns::HAS_TAIL) {
    const int tail = Columns::Tail(tile.n_tile, p.tiles.TilesAlongN());
    ptx::LoadBox(b + Traits::HEAD_BYTES, &p.weight_tails, full, k, tail, tile.weight_batch);
  }
}

template <typename Traits>
__device__ __forceinline__ void Produce(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring, uint32_t stages,
                                        TileSlots* slots) {
  using Columns = typename Traits::Columns;
  const int rank = p.cluster > 1 ? int(ptx::ClusterRank()) : 0;
  const bool is_leader = threadIdx.x % 32 == 0;
  hopper::RingPosition<Traits::STAGES> at;
  const int first = FirstBlock<Traits::SPLITS>(p), k_blocks = BlockCount<Traits::SPLITS>(p);
  ProducerTiles<Traits::BLOCK_M, Traits::STAGES, Traits::FOLLOWERS> tiles(p.tiles, ClusterBlocks<Traits::SPLITS>(p),
                                                                          rank, slots);
  Tile tile;
  bool has_tile = tiles.Next(tile);
  int early = 0;  // stages of the first tile whose weights are under way
  if constexpr (Traits::PARTS > 0 && !Traits::GATHERS) {
    if (p.weights_first) {
      early = min(Traits::STAGES, k_blocks);
      if (has_tile && is_leader) {
        for (hopper::RingPosition<Traits::STAGES> to; to.stage < early; ++to.stage) {
          tiles.BeginStage(ring, to, tile, to.stage, k_blocks);
          const uint32_t full = ring.BeginFill(to, Traits::STAGE_BYTES);
          const uint32_t b = stages + to.stage * Traits::STAGE_BYTES + Traits::A_BYTES;
          LoadWeights<Traits>(p, b, full, (first + to.stage) * Traits::BLOCK_K, tile);
        }
      }
      __syncwarp();
      ptx::GridDependencyWait();
    }
  }
  for (; has_tile; has_tile = tiles.Next(tile)) {
    for (int kb = 0; kb < k_blocks; ++kb, at.Advance()) {
      if (!is_leader) continue;
      const bool is_early = Traits::PARTS > 0 && early > 0;
      early = max(0, early - 1);
      if (!is_early) tiles.BeginStage(ring, at, tile, kb, p.k_blocks);  // counted tiles are not split
      const uint32_t full = is_early ? ring.Full(at.stage) : ring.BeginFill(at, Traits::LOADED_BYTES);
      const uint32_t a = stages + at.stage * Traits::STAGE_BYTES, b = a + Traits::A_BYTES;
      const int k = (first + kb) * Traits::BLOCK_K, n = Columns::Head(tile.n_tile);
      if constexpr (Traits::GATHERS) {
        // ProduceRows copies the tokens
      } else if (p.share_tokens) {
        constexpr int HALF = Traits::BLOCK_M / 2;
        ptx::LoadBoxMulticast(a + rank * (Traits::A_BYTES / 2), &p.tokens, full, k, tile.row + rank * HALF,
                              tile.token_batch, 3);
      } else {
        ptx::LoadBox(a, &p.tokens, full, k, tile.row, tile.token_batch);
      }
      if (is_early) continue;
      if (p.share_weights) {
        constexpr int HALF = Columns::HEAD / 2, HALF_TAIL = Columns::TAIL / 2;
        ptx::LoadBoxMulticast(b + rank * (Traits::HEAD_BYTES / 2), &p.weights, full, k, n + rank * HALF,
                              tile.weight_batch, 3);
        if constexpr (Columns::HAS_TAIL) {
          const int tail = Columns::Tail(tile.n_tile, p.tiles.TilesAlongN()) + rank * HALF_TAIL;
          ptx::LoadBoxMulticast(b + Traits::HEAD_BYTES + rank * (Traits::TAIL_BYTES / 2), &p.weight_tails, full, k,
                                tail, tile.weight_batch, 3);
        }
      } else if (Traits::CAN_GATE && p.activation.is_active) {
        ptx::LoadBox(b, &p.weights, full, k, n / 2, tile.weight_batch);
        ptx::LoadBox(b + Traits::B_BYTES / 2, &p.weights, full, k, p.n + n / 2, tile.weight_batch);
      } else {
        LoadWeights<Traits>(p, b, full, k, tile);
      }
    }
  }
  if (is_leader) tiles.End(ring, at);
  __syncwarp();
}

/// Copy the block scales of each stage.
template <typename Traits>
__device__ __forceinline__ void ProduceScales(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                              uint32_t scales, TileSlots* slots) {
  if (Traits::PARTS > 0 && p.weights_first) ptx::GridDependencyWait();
  const int first = FirstBlock<Traits::SPLITS>(p), end = first + BlockCount<Traits::SPLITS>(p);
  hopper::RingPosition<Traits::STAGES> at;
  FollowerTiles<Traits::FOLLOWERS> tiles(slots);
  Tile tile;
  while (tiles.Next(tile)) {
    const ScaleCopies<Traits::BLOCK_M, Traits::BLOCK_N, false> copies(p, tile);
    const auto run = [&](const auto& copy) {
      for (int kb = first; kb < end; ++kb, at.Advance()) {
        ring.WaitEmpty(at);
        copy(scales + at.stage * Traits::SCALE_BYTES, kb);
        ptx::MbarrierArriveCopies(ring.Full(at.stage));
      }
    };
    if constexpr (Traits::GATHERS) {
      const RowScaleCopies<Traits::BLOCK_M> rows(p, tile);
      run([&](uint32_t to, int kb) {
        rows.Run(p, to, kb);
        copies.RunWeights(p, to, kb);
      });
    } else {
      run([&](uint32_t to, int kb) { copies.Run(p, to, kb); });
    }
  }
  tiles.End(ring, at);
}

/// Copy the gathered tokens of each stage.
template <typename Traits>
__device__ __forceinline__ void ProduceRows(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                            uint32_t stages, TileSlots* slots) {
  hopper::RingPosition<Traits::STAGES> at;
  FollowerTiles<Traits::FOLLOWERS> tiles(slots);
  Tile tile;
  while (tiles.Next(tile)) {
    RowCopies<Traits::BLOCK_M> copies(p, tile);
    for (int kb = 0; kb < p.k_blocks; ++kb, at.Advance()) {
      ring.WaitEmpty(at);
      copies.Run(stages + at.stage * Traits::STAGE_BYTES);
      ptx::MbarrierArriveCopies(ring.Full(at.stage));
    }
  }
  tiles.End(ring, at);
}

template <typename Traits>
__device__ __forceinline__ void Consume(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring, uint32_t stages,
                                        const float* stage_scales, int group) {
  using Columns = typename Traits::Columns;
  const int group_row = group * Traits::GROUP_M;
  const StageOperands from = {hopper::DescriptorKMajor(stages + group_row * SLAB_K_BYTES),
                              hopper::DescriptorKMajor(stages + Traits::A_BYTES), Traits::STAGE_BYTES};
  const int lane_row = group_row + int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
  const float scale = Traits::IS_BLOCK ? 1.f : TensorScale(p);
  const uint32_t staging = stages + Traits::STAGES * Traits::STAGE_BYTES + (int(threadIdx.x) / 32 - 4) * 2048;
  hopper::RingPosition<Traits::STAGES> at;
  Tile tile;
  while (NextTile(stages - BARRIER_BYTES + TileSlots::OFFSET, ring, at, tile)) {
    int row = tile.row + group_row, column = Columns::Head(tile.n_tile);
    if (row >= tile.end_row) {
      SkipStages(ring, at, BlockCount<Traits::SPLITS>(p), p.cluster);
      if (Traits::SPLITS) SkipSplitSums();
      continue;
    }
    float acc[Traits::WAVES][Traits::GROUP_N / 2];
    if constexpr (Traits::PARTS > 0) {
      constexpr int STAGE_FLOATS = Traits::Scales::FLOATS;
      using Scales = std::conditional_t<Columns::HAS_TAIL, TailScales<Columns::TAIL, STAGE_FLOATS>,
                                        PartScales<Traits::BLOCK_N, Traits::PARTS, STAGE_FLOATS>>;
      Scales scales(stage_scales + lane_row, stage_scales + Traits::BLOCK_M, column);
      const int lane = threadIdx.x % 32, matrix_row = int(threadIdx.x) % WARPGROUP / 32 * 16 + lane % 16;
      const uint32_t rows =
          stages + group_row * SLAB_K_BYTES + hopper::Swizzle128(matrix_row * SLAB_K_BYTES + lane / 16 * 16);
      KeepTile(staging, tile, [&] {
        SumScaledParts<Traits::TYPE, Traits::PARTS, Traits::BLOCK_N / Traits::PARTS, Traits::GATHERS>(
            acc, ring, at, from, rows, BlockCount<Traits::SPLITS>(p), p.cluster, scales);
      });
      row = tile.row + group_row, column = Columns::Head(tile.n_tile);
      if constexpr (Traits::SPLITS) {
        if (p.split == 2) {
          StoreSplitSums<2, Traits::GROUP_N>(p, acc[0], stages, staging, column, tile, row);
          continue;
        }
        StoreSplitSums<PLAIN_MAX_SPLIT, Traits::GROUP_N>(p, acc[0], stages, staging, column, tile, row);
        continue;
      }
    } else if constexpr (Traits::IS_BLOCK) {
      RowScales<Traits::WAVES, Traits::GROUP_N, Traits::Scales::FLOATS> scales(stage_scales + lane_row,
                                                                               stage_scales + Traits::BLOCK_M, column);
      const int waves = min(Traits::WAVES, CeilDivide(tile.end_row - row, 64));
      SumScaledStages<Traits::TYPE, Traits::WAVES, Traits::GROUP_N>(acc, ring, at, from, p.k_blocks, p.cluster, scales,
                                                                    waves);
    } else {
      SumStages<Traits::TYPE, Traits::WAVES, Traits::GROUP_N>(acc, ring, at, from, p.k_blocks, p.cluster);
    }
    if constexpr (Traits::IN_HALVES) {
      if (p.activation.is_active) {
        StoreGatedBlocks(p, acc, staging, column / 2, tile, row);
        continue;
      }
    }
    if constexpr (Columns::HAS_TAIL) {
      constexpr int HEAD = Columns::HEAD, TAIL = Columns::TAIL;
      StoreColumns<HEAD>(p, reinterpret_cast<float (&)[HEAD / 2]>(acc[0][0]), scale, staging, column, tile, row);
      StoreColumns<TAIL>(p, reinterpret_cast<float (&)[TAIL / 2]>(acc[0][HEAD / 2]), scale, staging,
                         Columns::Tail(tile.n_tile, p.tiles.TilesAlongN()), tile, row);
    } else if (Traits::PARTS > 0 && AreWholeColumns<Traits::BLOCK_N>(p, column)) {
#pragma unroll
      for (int w = 0; w < Traits::WAVES; ++w) {
        StoreWholeColumns<Traits::GROUP_N>(p, acc[w], staging, column + w * Traits::GROUP_N, tile, row);
      }
    } else {
#pragma unroll
      for (int w = 0; w < Traits::WAVES; ++w) {
        const int wave_row = Traits::IN_HALVES ? row : row + 64 * w;
        if (wave_row >= tile.end_row) break;
        if constexpr (Traits::CAN_GATE && !Traits::IS_BLOCK) {
          if (p.activation.is_active) {
            StoreGatedRows<Traits::GROUP_N>(p, acc[w], scale, staging, column / 2, tile, wave_row);
            continue;
          }
        }
        if constexpr (Traits::PARTS > 0) {
          StoreRows<Traits::GROUP_N>(p, acc[w], scale * WeightFactor(p, tile), staging,
                                     Traits::IN_HALVES ? column + w * Traits::GROUP_N : column, tile, wave_row);
        } else {
          StoreColumns<Traits::GROUP_N>(p, acc[w], scale, staging, column, tile, wave_row);
        }
      }
    }
  }
}

#endif

template <typename Traits>
__global__ void __launch_bounds__(GEMM_THREADS, 1) GemmSm90Kernel(const __grid_constant__ GemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const hopper::AlignedMemory aligned = hopper::Aligned(shared);
  const uint32_t base = aligned.base;
  unsigned char* const memory = aligned.data;
  const hopper::Ring<Traits::STAGES> ring{base};
  const uint32_t stages = base + BARRIER_BYTES;
  constexpr int SCALES = BARRIER_BYTES + Traits::STAGES * Traits::STAGE_BYTES + Traits::STAGING_BYTES;
  auto* const slots = reinterpret_cast<TileSlots*>(memory + TileSlots::OFFSET);
  const auto* const scales = reinterpret_cast<const float*>(memory + SCALES);
  if (threadIdx.x == 0) {
    if constexpr (!Traits::GATHERS) ptx::PrefetchTensorMap(&p.tokens);
    ptx::PrefetchTensorMap(&p.weights);
    if constexpr (Traits::Columns::HAS_TAIL) ptx::PrefetchTensorMap(&p.weight_tails);
    ring.Init(CONSUMERS * WARPGROUP / 32 * p.cluster, 1 + 32 * Traits::FOLLOWERS);
  }
  if (p.cluster > 1) {
    ptx::ClusterSync();
  } else {
    __syncthreads();
  }
  if (Traits::PARTS == 0 || !p.weights_first) ptx::GridDependencyWait();
  ptx::LaunchDependents();
  hopper::RunRoles<PRODUCER_REGISTERS, CONSUMER_REGISTERS>(
      [&] {
        if (threadIdx.x < 32) {
          Produce<Traits>(p, ring, stages, slots);
        } else if (Traits::IS_BLOCK && threadIdx.x < 64) {
          ProduceScales<Traits>(p, ring, base + SCALES, slots);
        } else if (Traits::GATHERS && threadIdx.x >= WARPGROUP - 32 * GATHER_WARPS) {
          if constexpr (Traits::GATHERS) ProduceRows<Traits>(p, ring, stages, slots);
        }
        if (Traits::SPLITS) ClusterBarrier();
      },
      [&](int group) { Consume<Traits>(p, ring, stages, scales, group); });
  // Other blocks may still signal barriers of this one, or read its accumulators.
  if (ClusterBlocks<Traits::SPLITS>(p) > 1) ptx::ClusterSync();
#endif
}

/// Compute d = a b^T with tiles of BLOCK_M tokens by BLOCK_N weights.
template <typename T, Scaling SCALING, int BLOCK_M, int BLOCK_N, Form FORM>
Status GemmSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream) {
  using Traits = GemmTraits<T, SCALING, BLOCK_M, BLOCK_N, FORM>;
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return cudaSuccess;
  if (problem.grouping == Grouping::kContiguous && CONTIGUOUS_ALIGNMENT % BLOCK_M != 0) return cudaErrorInvalidValue;
  if (problem.grouping != Grouping::kBatched && (config.share_b || config.split_k)) return cudaErrorInvalidValue;
  if (config.split_k != Traits::SPLITS) return cudaErrorInvalidValue;
  if (Traits::SPLITS && config.cluster != 2 && config.cluster != PLAIN_MAX_SPLIT) return cudaErrorInvalidValue;
  if ((problem.row_indices != nullptr) != Traits::GATHERS) return cudaErrorInvalidValue;
  if (Traits::GATHERS && (problem.grouping != Grouping::kPacked || config.cluster != 1)) return cudaErrorInvalidValue;
  if (problem.activation.is_active && (!Traits::CAN_GATE || config.share_b)) return cudaErrorInvalidValue;
  if (problem.activation.is_active && Traits::IS_BLOCK &&
      (problem.n % (2 * SCALE_BLOCK) != 0 || problem.activation.scales == nullptr)) {
    return cudaErrorInvalidValue;
  }
  GemmParams p{};
  cudaError_t status = FillParams<T>(&p, problem, config, BLOCK_M, BLOCK_N, Traits::Columns::TAIL);
  if (status != cudaSuccess) return status;
  if (p.k_blocks < p.split) return cudaErrorInvalidValue;  // each block has K
  p.weights_first = Traits::PARTS > 0 && config.enable_pdl && config.weights_first && p.cluster == 1 &&
                    problem.grouping == Grouping::kBatched && !problem.activation.is_active;
  constexpr auto* KERNEL = GemmSm90Kernel<Traits>;
  status = device::AllowShared<KERNEL, Traits::SHARED_BYTES>();
  if (status != cudaSuccess) return status;
  int clusters = std::max(1, config.blocks / config.cluster);
  if (!p.tiles.IsCounted()) clusters = p.split > 1 ? p.tiles.Total() : std::min(clusters, p.tiles.Total());
  const LaunchConfig launch(dim3(clusters * config.cluster), dim3(GEMM_THREADS), Traits::SHARED_BYTES,
                            config.enable_pdl, stream, config.cluster);
  return launch.Launch(KERNEL, p);
}

}  // namespace gemm
}  // namespace flashinfer
