// SPDX-License-Identifier: Apache-2.0
// A whole mixture of experts for few tokens in one launch: one block per SM, two products with a barrier of the grid
// between them. The time is that of reading the weights of the chosen experts once:
// - Rows of weights are shared equally among the blocks, to a row.
// - Each warp has a ring of stages in shared memory, which it fills with cp.async far ahead of what it multiplies, across
//   tiles and across the barrier: weights of product 2 do not depend on product 1.
// - Tokens are columns of the tensor cores: a product of 8 tokens takes as long as that of one.
// The warps of a block split the columns of a tile; their sums are added in a fixed order, and so are the experts of a
// token. Sums stay fp32 until the output is rounded. Parameters in mono.h.
//   test  pytest tests/fused_moe/test_emulated_mono.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "../attention/occupancy.cuh"
#include "../ptx/atomic.cuh"
#include "../ptx/pdl.cuh"
#include "../vec_dtypes.cuh"
#include "activate.cuh"
#include "mono_pairs.cuh"
#include "mono_weights.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int WARPS = FLASHINFER_MONO_WARPS, THREADS = WARPS * 32, STAGES = FLASHINFER_MONO_STAGES;
static_assert(THREADS >= MONO_MAX_PAIRS, "FindChoices has a thread for each pair");

/// Arrivals and turns of the barrier of the grid. One for all launches: a block takes more than half of the shared memory of
/// an SM and a cooperative grid has a block on each, so no other grid of this kernel arrives before this one has passed.
static __device__ int32_t grid_barrier[2];

/// Wait until all blocks are here; writes before the barrier are visible after it, but not through L1.
__device__ __forceinline__ void SyncGrid(int32_t (&barrier)[2]) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t turn = ptx::LoadAcquire(&barrier[1]);
    if (ptx::AddOrdered(&barrier[0], 1) == int32_t(gridDim.x) - 1) {
      barrier[0] = 0;
      ptx::StoreRelease(&barrier[1], turn + 1);
    } else {
      while (ptx::LoadAcquire(&barrier[1]) == turn) {
      }
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float Load16(const void* data, int64_t index, Element element) {
  return element == Element::kFloat16 ? __half2float(static_cast<const __half*>(data)[index])
                                      : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}
__device__ __forceinline__ void Store16(void* data, int64_t index, Element element, float x) {
  if (element == Element::kFloat16) {
    static_cast<__half*>(data)[index] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
  }
}

/// Sums of the warps of one tile: (parts, 8-token tiles, lanes, 4), in the order of mma's accumulators.
template <int TILES>
using PartialSums = float[WARPS][TILES * 128];

/// A block's share of a layer.
template <typename Weights, int TILES>
class Block {
 public:
  using T = typename Weights::Element;
  static constexpr int TOKENS = TILES * 8;
  using Fragment = TokenFragment<TILES, Weights::VECTORS>;

  __device__ __forceinline__ Block(const MonoParams& p, const Choices<TOKENS>& choices, uint32_t ring)
      : p_(p), choices_(choices), is_gated_(IsGated(p.activation.type)) {
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    work_.active = choices.active, work_.active_count = choices.count;
    work_.units1 = p.intermediate, work_.height = is_gated_ ? 8 : TILE_ROWS;
    const int64_t units = int64_t(choices.count) * p.intermediate;
    work_.begin1 = int(units * block / blocks), work_.end1 = int(units * (block + 1) / blocks);
    work_.begin2 = int(p.hidden * block / blocks), work_.end2 = int(p.hidden * (block + 1) / blocks);
    work_.chunks1 = (p.hidden + Weights::COLUMNS - 1) / Weights::COLUMNS;
    work_.chunks2 = (p.intermediate + Weights::COLUMNS - 1) / Weights::COLUMNS;
    const int inner = p.intermediate;
    rows1_ = is_gated_ ? 2 * inner : inner, gate_ = is_gated_ ? inner : 0;
    ring_ = ring + (threadIdx.x / 32) * (STAGES * Weights::BYTES);
  }

  __device__ __forceinline__ void Run(PartialSums<TILES> (&partial)[2], int32_t (&barrier)[2]) {
    const int warp = int(threadIdx.x) / 32;
    Walk<WARPS> ahead(work_, warp, 1);
    ahead.SkipEmpty(work_);
    uint32_t slot = 0;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) Request(ahead, i);
    int tiles = 0;
    for (Walk<WARPS> at(work_, warp, 1); at.product == 1 && !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<1>(at, ahead, slot, partial[tiles % 2]);
      Finish1(at, partial[tiles % 2]);
    }
    SyncGrid(barrier);
    for (Walk<WARPS> at(work_, warp, 2); !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<2>(at, ahead, slot, partial[tiles % 2]);
      Finish2(at, partial[tiles % 2]);
    }
  }

 private:
  /// Begin to copy the stage of a walk, if there is one, and go on to the next.
  __device__ __forceinline__ void Request(Walk<WARPS>& ahead, uint32_t slot) {
    if (!ahead.IsDone()) {
      const bool is_first = ahead.product == 1, is_paired = is_first && is_gated_;
      Matrix m;  // a member by product would be an array in local memory
      m.data = is_first ? p_.fc1 : p_.fc2, m.scales = is_first ? p_.fc1_scales : p_.fc2_scales;
      m.rows = is_first ? rows1_ : p_.hidden, m.columns = is_first ? p_.hidden : p_.intermediate;
      m.first = is_paired ? gate_ : 0, m.second = is_paired ? -gate_ - 8 : 0;  // 8 rows of gate, then those of up
      Weights::Request(ring_ + slot * Weights::BYTES, m, work_.active[ahead.active], ahead.row, ahead.rows, ahead.chunk,
                       is_paired);
      ahead.Advance(work_);
    }
    ptx::CopyCommit();
  }

  template <int PRODUCT>
  __device__ __forceinline__ void LoadTokens(const Walk<WARPS>& at, Fragment& to) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int token = t * 8 + lane / 4, pair = choices_.of[at.active][token].pair;
      if (PRODUCT == 1) {
        const T* const x = static_cast<const T*>(p_.input) + token * p_.input_stride;
        Weights::LoadToken(pair < 0 ? nullptr : x, at.chunk, p_.hidden, to.x[t],
                           [](const uint4* from) { return *from; });
      } else {  // written by other SMs: not through L1
        const T* const x = static_cast<const T*>(p_.hidden_values) + int64_t(pair) * p_.intermediate;
        Weights::LoadToken(pair < 0 ? nullptr : x, at.chunk, p_.intermediate, to.x[t],
                           [](const uint4* from) { return __ldcg(from); });
      }
    }
  }

  /// Multiply the stages of this warp in a tile, and write its sums.
  template <int PRODUCT>
  __device__ __forceinline__ void Tile(Walk<WARPS> at, Walk<WARPS>& ahead, uint32_t& slot,
                                       PartialSums<TILES>& partial) {
    const int lane = int(threadIdx.x) % 32;
    float total[TILES][4] = {};
    Fragment tokens, next;
    if (at.HasStage(work_)) LoadTokens<PRODUCT>(at, tokens);
#pragma unroll 1
    while (at.HasStage(work_)) {
      const int active = at.active;
      at.NextStage(work_);
      if (at.HasStage(work_)) LoadTokens<PRODUCT>(at, next);
      ptx::CopyWait<STAGES - 2>();
      __syncwarp();  // all lanes have the stage, and have read the one before
      Request(ahead, slot == 0 ? STAGES - 1 : slot - 1);
      float sums[TILES][4] = {};
      Weights::Multiply(ring_ + slot * Weights::BYTES, tokens, sums);
      slot = slot == STAGES - 1 ? 0 : slot + 1;
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (PRODUCT == 1) {
            total[t][i] += sums[t][i];
          } else {  // weights that are not finite reach no other token
            const Choice& choice = choices_.of[active][t * 8 + lane % 4 * 2 + i % 2];
            if (choice.pair >= 0) total[t][i] += choice.factor * sums[t][i];
          }
        }
      }
      tokens = next;
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      *reinterpret_cast<float4*>(&partial[at.Part()][t * 128 + lane * 4]) =
          float4{total[t][0], total[t][1], total[t][2], total[t][3]};
    }
    __syncthreads();
  }

  /// Add the warps' sums, in the order of their parts.
  __device__ __forceinline__ static float Sum(const PartialSums<TILES>& partial, int index) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += partial[i][index];
    return x;
  }

  /// Write the hidden values of a tile.
  __device__ __forceinline__ void Finish1(const Walk<WARPS>& at, const PartialSums<TILES>& partial) const {
    const int expert = work_.active[at.active], each = is_gated_ ? 2 : 4;  // sums of an accumulator
    for (int i = int(threadIdx.x); i < TILES * 32 * each; i += THREADS) {
      const int lane = i / each % 32, part = i % each, tile = i / each / 32, index = tile * 128 + lane * 4 + part;
      const int in_tile = lane / 4 + part / 2 * 8, token = tile * 8 + lane % 4 * 2 + part % 2;
      const int pair = choices_.of[at.active][token].pair, row = at.row + in_tile;
      if (in_tile >= at.rows || pair < 0) continue;
      float gate = Sum(partial, index), up = is_gated_ ? Sum(partial, index + 2) : 0.f;
      if (p_.bias1 != nullptr) {
        const int64_t first = int64_t(expert) * rows1_ + row;
        gate += Load16(p_.bias1, first + gate_, p_.output_element);
        if (is_gated_) up += Load16(p_.bias1, first, p_.output_element);
      }
      const float h = ActivateValue(p_.activation.type, ConstantsOf(p_.activation, expert), gate, up);
      Store16(p_.hidden_values, int64_t(pair) * p_.intermediate + row, p_.element, h);
    }
  }

  /// Write the outputs of a tile.
  __device__ __forceinline__ void Finish2(const Walk<WARPS>& at, const PartialSums<TILES>& partial) const {
    for (int i = int(threadIdx.x); i < TILES * 128; i += THREADS) {
      const int lane = i / 4 % 32, part = i % 4;
      const int in_tile = lane / 4 + part / 2 * 8, token = i / 128 * 8 + lane % 4 * 2 + part % 2,
                row = at.row + in_tile;
      if (in_tile >= at.rows || token >= p_.tokens) continue;
      float x = Sum(partial, i);
      if (p_.bias2 != nullptr) {
        for (int a = 0; a < work_.active_count; ++a) {
          const Choice& choice = choices_.of[a][token];
          if (choice.pair < 0) continue;
          x += choice.factor * Load16(p_.bias2, int64_t(work_.active[a]) * p_.hidden + row, p_.output_element);
        }
      }
      Store16(p_.output, token * p_.output_stride + row, p_.output_element, x);
    }
  }

  const MonoParams& p_;
  const Choices<TOKENS>& choices_;
  const bool is_gated_;
  Work work_;
  int rows1_, gate_;  // rows of an expert's first weights; the first row of gate, in [up ; gate]
  uint32_t ring_;
};

/// Shared memory of a block.
template <typename Weights, int TILES>
struct alignas(128) Memory {
  unsigned char ring[WARPS][STAGES][Weights::BYTES];
  PartialSums<TILES> partial[2];
  Choices<TILES * 8> choices;
};

template <typename Weights, int TILES>
__global__ void __launch_bounds__(THREADS, 1) MonoKernel(const __grid_constant__ MonoParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& memory = *reinterpret_cast<Memory<Weights, TILES>*>(shared_memory);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  FindChoices(p, memory.choices);
  Block<Weights, TILES>(p, memory.choices, ptx::SharedAddress(memory.ring)).Run(memory.partial, grid_barrier);
}

template <typename Weights, int TILES>
Status Launch(const MonoParams& p, Stream stream) {
  constexpr auto* KERNEL = MonoKernel<Weights, TILES>;
  constexpr int BYTES = sizeof(Memory<Weights, TILES>);
  static_assert(BYTES > 114 * 1024, "two grids must not be on an SM at once: they share a barrier");
  const int blocks = attention::MaxActiveBlocksOf<KERNEL, THREADS, BYTES>();
  if (blocks == 0) return cudaErrorNotSupported;
  LaunchConfig config(dim3(unsigned(blocks)), dim3(THREADS), BYTES, p.enable_pdl && FLASHINFER_MONO_PDL, stream);
  if (FLASHINFER_MONO_COOPERATIVE) config.SetCooperative();
  return config.Launch(KERNEL, p);
}

}  // namespace mono

template <typename Weights>
Status LaunchMono(const MonoParams& p, Stream stream) {
  return p.tokens <= 8 ? mono::Launch<Weights, 1>(p, stream) : mono::Launch<Weights, 2>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
