// SPDX-License-Identifier: Apache-2.0
// GEMM for few tokens: weights are the M side of the tensor cores (64 rows per warpgroup) and tokens the N side, so
// tokens are not padded to 64. Weights stream through a ring that fills shared memory. The K units of all tiles,
// concatenated, are split evenly among the blocks; split_sm90.cuh adds the partial sums of tiles that several blocks
// share.
#pragma once
#include "../ptx/pdl.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "mainloop_sm90.cuh"
#include "params_sm90.cuh"
#include "split_sm90.cuh"
#include "store_sm90.cuh"

namespace flashinfer {
namespace gemm {

template <typename T, Scaling SCALING, int TOKENS_>
struct SwappedTraits {
  static constexpr ptx::WgmmaType TYPE = WgmmaTypeOf<T>::TYPE;
  static constexpr bool IS_BLOCK = SCALING == Scaling::kBlock;
  static constexpr int TOKENS = TOKENS_;
  static constexpr int BLOCK_K = SLAB_K_BYTES / WgmmaTypeOf<T>::BYTES;
  static constexpr int WEIGHT_BYTES = SWAPPED_WEIGHTS * SLAB_K_BYTES, TOKEN_BYTES = TOKENS * SLAB_K_BYTES;
  static constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKEN_BYTES;
  static constexpr int STORE_BYTES = TOKENS * hopper::SLAB_ROW_BYTES;  // bytes of the staging buffer per warpgroup
  static constexpr int RING_BYTES = MAX_SHARED_BYTES - 1024 - BARRIER_BYTES - CONSUMERS * STORE_BYTES;
  static constexpr int STAGES = RING_BYTES / STAGE_BYTES;
  static constexpr int SHARED_BYTES = 1024 + BARRIER_BYTES + STAGES * STAGE_BYTES + CONSUMERS * STORE_BYTES;
  static constexpr int FLAG_OFFSET = BARRIER_BYTES - 64;  // byte offset of the flags, behind the barriers
  static_assert(2 * STAGES * 8 <= FLAG_OFFSET && TOKENS % 8 == 0 && STAGE_BYTES % 1024 == 0, "tile shape");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Block scales for weights on the M side: per thread, two rows of weights, and two tokens of every eight.
template <int TOKENS>
class ColumnScales {
 public:
  __device__ __forceinline__ ColumnScales(const GemmParams& p, const Tile& tile, int column)
      : token_k_(p.token_scale.k_stride),
        token_row_(p.token_scale.row_stride),
        weight_k_(p.weight_scale.k_stride),
        last_(tile.end_row - 1 - tile.row) {
    const ScaleView &a = p.token_scale, &b = p.weight_scale;
    tokens_ = a.data + tile.token_batch * a.batch_stride + tile.row * a.row_stride;
    const int row = column + int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weights_[i] = b.data + tile.weight_batch * b.batch_stride + min(row + 8 * i, p.n - 1) / b.rows * b.row_stride;
    }
  }
  __device__ __forceinline__ void Load(int kb) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next_weights_[i] = weights_[i][kb * weight_k_];
    const float* const tokens = tokens_ + kb * token_k_;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; ++i) {
      const int token = min(i / 2 * 8 + int(threadIdx.x) % 4 * 2 + i % 2, last_);
      next_tokens_[i] = tokens[token * token_row_];
    }
  }
  __device__ __forceinline__ void Take() {
#pragma unroll
    for (int i = 0; i < 2; ++i) now_weights_[i] = next_weights_[i];
#pragma unroll
    for (int i = 0; i < TOKENS / 4; ++i) now_tokens_[i] = next_tokens_[i];
  }
  __device__ __forceinline__ void Add(float (&acc)[TOKENS / 2], const float (&x)[TOKENS / 2], int) const {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      acc[i] = fmaf(x[i], now_weights_[i % 4 / 2] * now_tokens_[i / 4 * 2 + i % 2], acc[i]);
    }
  }

 private:
  const float* tokens_;
  const float* weights_[2];
  const int64_t token_k_, token_row_, weight_k_;
  const int last_;
  float next_tokens_[TOKENS / 4], now_tokens_[TOKENS / 4], next_weights_[2], now_weights_[2];
};

template <typename Traits>
__device__ __forceinline__ void ProduceSwapped(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                               uint32_t stages) {
  const bool is_leader = threadIdx.x % 32 == 0;
  const uint64_t once = ptx::PolicyEvictFirst(), keep = ptx::PolicyEvictLast();
  hopper::RingPosition<Traits::STAGES> at;
  TileList<Traits::TOKENS> list(p.tiles, 0);
  const UnitRange range = RangeOfBlock(int64_t(list.Count()) * p.k_blocks);
  Tile tile;
  for (int64_t unit = range.begin; unit < range.end;) {
    const int t = int(unit / p.k_blocks), first = int(unit - int64_t(t) * p.k_blocks);
    const int count = int(min(int64_t(p.k_blocks - first), range.end - unit));
    unit += count;
    if (!list.Get(t, tile) || !tile.exists) continue;
    for (int kb = first; kb < first + count; ++kb, at.Advance()) {
      if (!is_leader) continue;
      const uint32_t full = ring.BeginFill(at, Traits::STAGE_BYTES);
      const uint32_t weights = stages + at.stage * Traits::STAGE_BYTES, tokens = weights + Traits::WEIGHT_BYTES;
      const int k = kb * Traits::BLOCK_K, n = tile.n_tile * SWAPPED_WEIGHTS;
      if (p.read_weights_once) {
        ptx::LoadBox(weights, &p.weights, full, k, n, tile.weight_batch, once);
      } else {
        ptx::LoadBox(weights, &p.weights, full, k, n, tile.weight_batch);
      }
      ptx::LoadBox(tokens, &p.tokens, full, k, tile.row, tile.token_batch, keep);
    }
  }
  __syncwarp();
}

template <typename Traits>
__device__ __forceinline__ void ConsumeSwapped(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                               uint32_t stages, int group, volatile int* flag) {
  constexpr int TOKENS = Traits::TOKENS;
  const StageOperands from = {hopper::DescriptorKMajor(stages + group * 64 * SLAB_K_BYTES),
                              hopper::DescriptorKMajor(stages + Traits::WEIGHT_BYTES), Traits::STAGE_BYTES};
  const uint32_t buffer = stages + Traits::STAGES * Traits::STAGE_BYTES + group * Traits::STORE_BYTES;
  const float scale = Traits::IS_BLOCK ? 1.f : TensorScale(p);
  hopper::RingPosition<Traits::STAGES> at;
  TileList<TOKENS> list(p.tiles, 0);
  const UnitRange range = RangeOfBlock(int64_t(list.Count()) * p.k_blocks);
  Tile tile;
  for (int64_t unit = range.begin; unit < range.end;) {
    const int t = int(unit / p.k_blocks), first = int(unit - int64_t(t) * p.k_blocks);
    const int count = int(min(int64_t(p.k_blocks - first), range.end - unit));
    unit += count;
    if (!list.Get(t, tile) || !tile.exists) continue;
    const int column = tile.n_tile * SWAPPED_WEIGHTS + group * 64;
    float acc[1][TOKENS / 2];
    if constexpr (Traits::IS_BLOCK) {
      ColumnScales<TOKENS> scales(p, tile, column);
      SumScaledStages<Traits::TYPE, 1, TOKENS>(acc, ring, at, from, first, count, 1, scales);
    } else {
      SumStages<Traits::TYPE, 1, TOKENS>(acc, ring, at, from, count, 1);
    }
    if (count < p.k_blocks && !AddParts(p, acc[0], range, t, group, flag)) continue;
    StoreTransposed<TOKENS>(p, acc[0], scale, buffer, group, column, tile);
  }
  if (threadIdx.x % WARPGROUP == 0) ptx::WaitStoresRead<0>();
}

#endif

template <typename Traits>
__global__ void __launch_bounds__(GEMM_THREADS, 1) GemmSwappedSm90Kernel(const __grid_constant__ GemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const uint32_t address = ptx::SharedAddress(shared), base = (address + 1023) / 1024 * 1024;
  const hopper::Ring<Traits::STAGES> ring{base};
  const uint32_t stages = base + BARRIER_BYTES;
  if (threadIdx.x == 0) {
    ptx::PrefetchTensorMap(&p.tokens);
    ptx::PrefetchTensorMap(&p.weights);
    ptx::PrefetchTensorMap(&p.out);
    ring.Init(CONSUMERS * WARPGROUP / 32);
  }
  __syncthreads();
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const int role = __shfl_sync(~0u, int(threadIdx.x) / WARPGROUP, 0);
  if (role == 0) {
    ptx::ReleaseRegisters<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) ProduceSwapped<Traits>(p, ring, stages);
  } else {
    ptx::TakeRegisters<CONSUMER_REGISTERS>();
    int* const flags = reinterpret_cast<int*>(shared + (base - address) + Traits::FLAG_OFFSET);
    ConsumeSwapped<Traits>(p, ring, stages, role - 1, flags + role - 1);
  }
#endif
}

/// Compute d = a b^T with tiles of TOKENS tokens by 128 weights. With block scaling, every row of weights may have a
/// scale.
template <typename T, Scaling SCALING, int TOKENS>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream) {
  using Traits = SwappedTraits<T, SCALING, TOKENS>;
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return cudaSuccess;
  if (config.cluster != 1 || problem.workspace == nullptr || config.blocks > MAX_SPLIT_BLOCKS)
    return cudaErrorInvalidValue;
  GemmParams p{};
  cudaError_t status = FillParams<T>(&p, problem, config, TOKENS, SWAPPED_WEIGHTS, TOKENS);
  if (status != cudaSuccess) return status;
  p.tiles.raster = std::max(1, p.tiles.m_tiles);  // all tokens of one tile of weights, then the next weights
  p.read_weights_once = problem.m <= TOKENS;
  static std::atomic<uint64_t> allowed{0};
  auto* kernel = GemmSwappedSm90Kernel<Traits>;
  status = AllowShared(kernel, Traits::SHARED_BYTES, &allowed);
  if (status != cudaSuccess) return status;
  const LaunchConfig launch(dim3(config.blocks), dim3(GEMM_THREADS), Traits::SHARED_BYTES, config.enable_pdl, stream);
  return launch.Launch(kernel, p);
}

}  // namespace gemm
}  // namespace flashinfer
