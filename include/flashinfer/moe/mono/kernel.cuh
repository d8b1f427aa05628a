// SPDX-License-Identifier: Apache-2.0
// A whole mixture of experts for few tokens in one launch: one block per SM, two products with a barrier of the grid
// between them. The time is that of reading the weights of the chosen experts once:
// - Rows of weights are shared equally among the blocks, to a row.
// - Each warp has a ring of stages in shared memory, which it fills with cp.async far ahead of what it multiplies, across
//   tiles and across the barrier: weights of GEMM 2 do not depend on GEMM 1.
// - Tokens are columns of the tensor cores: a product of 8 tokens takes as long as that of one.
// The warps of a block split the columns of a tile; their accumulators are added in a fixed order, and so are the experts of a
// token. Sums stay fp32 until the output is rounded. Parameters in shape.h.
// This is the form of 16-bit weights. One token has forms of its own with e4m3 blocks (fp8_one.cuh) and with MXFP4
// (mxfp4_one.cuh).
//
//   block b of all SMs     find experts ──► GEMM 1: its rows of fc1 ──► hidden values ──► grid barrier ──┐
//                          GEMM 2: its rows of fc2 ──► sum over experts ──► output  ◄───────────────────┘
//   each warp              [stage][stage][stage][stage]  cp.async runs ahead over tiles and over the barrier
//   test  pytest tests/fused_moe/test_emulated_mono.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include <algorithm>

#include "../../device/occupancy.cuh"
#include "../../grid_barrier.cuh"
#include "../../ptx/pdl.cuh"
#include "../../vec_dtypes.cuh"
#include "../activate.cuh"
#include "experts_of_few.cuh"
#include "block_rows.cuh"
#include "weights.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

/// Wait until all threads of the grid are here; writes before the barrier are visible after it, but not through L1.
__device__ __forceinline__ void SyncGrid(int32_t& barrier) {
  __syncthreads();
  if (threadIdx.x == 0) MeetGrid(barrier);
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

/// Accumulators of the warps of one tile: (parts, 8-token tiles, lanes, 4), in the order of mma's accumulators.
template <typename Weights, int TILES>
using PartialSums = float[Weights::WARPS][TILES * 128];

/// Shared memory of a block.
template <typename Weights, int TILES>
struct alignas(128) Memory {
  unsigned char ring[Weights::WARPS][Weights::STAGES][Weights::BYTES];
  Choices<TILES * 8> choices;
  ActivationConstants constants[MONO_MAX_PAIRS];  // one entry per active expert
  alignas(16) PartialSums<Weights, TILES> partial[2];
};

/// Operands that a lane multiplies with the weights of a stage, in registers.
template <typename Weights, int TILES>
struct Operands {
  uint4 tokens[TILES][Weights::VECTORS];
  float bias[2];  // biases of rows lane / 4 and lane / 4 + 8, in the stage of an expert's first columns
};

/// A block's share of a layer.
template <typename Weights, int TILES>
class Block {
 public:
  static constexpr int WARPS = Weights::WARPS, STAGES = Weights::STAGES, THREADS = WARPS * 32;
  static_assert(THREADS >= MONO_MAX_PAIRS, "FindChoices has a thread for each pair");
  using T = typename Weights::Element;
  using Sums = PartialSums<Weights, TILES>;

  __device__ __forceinline__ Block(const MonoParams& p, Memory<Weights, TILES>& memory)
      : p_(p), memory_(memory), choices_(memory.choices), is_gated_(KeepInRegister(IsGated(p.activation.type))) {
    work_.active = choices_.active, work_.active_count = choices_.count;
    work_.units1 = p.intermediate, work_.height = is_gated_ ? 8 : TILE_ROWS;
    ShareRows(choices_.count * p.intermediate, int(blockIdx.x), work_.begin1, work_.end1);
    int from_end, to_end;  // the last blocks have more of GEMM 2, as the first ones have of GEMM 1
    ShareRows(p.hidden, int(gridDim.x - 1 - blockIdx.x), from_end, to_end);
    work_.begin2 = p.hidden - to_end, work_.end2 = p.hidden - from_end;
    work_.chunks1 = (p.hidden + Weights::COLUMNS - 1) / Weights::COLUMNS;
    work_.chunks2 = (p.intermediate + Weights::COLUMNS - 1) / Weights::COLUMNS;
    const int inner = p.intermediate;
    rows1_ = is_gated_ ? 2 * inner : inner, gate_ = is_gated_ ? inner : 0;
    ring_ = ptx::SharedAddress(memory.ring[threadIdx.x / 32]);
  }

  /// Compute the share.
  __device__ __forceinline__ void Run(int32_t& barrier) {
    const int warp = int(threadIdx.x) / 32;
    CopyOrder<WARPS> ahead(work_, warp, 1);
    ahead.SkipEmpty(work_);
    uint32_t slot = 0;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) Request(ahead, i);
    FindConstants();
    int tiles = 0;
    for (CopyOrder<WARPS> at(work_, warp, 1); at.product == 1 && !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<1>(at, ahead, slot, memory_.partial[tiles % 2]);
      Finish1(at, memory_.partial[tiles % 2]);
    }
    SyncGrid(barrier);
    for (CopyOrder<WARPS> at(work_, warp, 2); !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<2>(at, ahead, slot, memory_.partial[tiles % 2]);
      Finish2(at, memory_.partial[tiles % 2]);
    }
  }

 private:
  /// Return x, in a way that the compiler does not compute it again in each stage.
  __device__ __forceinline__ static bool KeepInRegister(bool x) { return __shfl_sync(~0u, int(x), 0) != 0; }
  /// Begin to copy the stage of a copy order, if there is one, and go on to the next.
  __device__ __forceinline__ void Request(CopyOrder<WARPS>& ahead, uint32_t slot) {
    if (!ahead.IsDone()) {
      const bool is_first = ahead.product == 1, is_paired = is_first && is_gated_;
      Matrix m;  // a member by product would be an array in local memory
      m.data = is_first ? p_.fc1 : p_.fc2;
      m.rows = is_first ? rows1_ : p_.hidden, m.columns = is_first ? p_.hidden : p_.intermediate;
      m.first = is_first ? gate_ : 0;
      m.second = is_paired ? -gate_ - 8 : 0;  // 8 rows of gate, then those of up
      Weights::Request(ring_ + slot * Weights::BYTES, m, work_.active[ahead.active], ahead.row, ahead.rows, ahead.chunk,
                       is_paired);
      ahead.Advance(work_);
    }
    ptx::CopyCommit();
  }

  /// Find the constants of active experts' activations, which are read behind the barrier of a tile.
  __device__ __forceinline__ void FindConstants() const {
    for (int i = int(threadIdx.x); i < choices_.count; i += THREADS) {
      memory_.constants[i] = ConstantsOf(p_.activation, choices_.active[i]);
    }
  }

  template <int PRODUCT>
  __device__ __forceinline__ void Load(const CopyOrder<WARPS>& at, Operands<Weights, TILES>& to) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int token = t * 8 + lane / 4, pair = choices_.of[at.active][token].pair;
      if (PRODUCT == 1) {
        const T* const x = static_cast<const T*>(p_.input) + token * p_.input_stride;
        Weights::template LoadToken<1>(pair < 0 ? nullptr : x, at.chunk, p_.hidden, to.tokens[t]);
      } else {
        const T* const x = static_cast<const T*>(p_.hidden_values) + int64_t(pair) * p_.intermediate;
        Weights::template LoadToken<2>(pair < 0 ? nullptr : x, at.chunk, p_.intermediate, to.tokens[t]);
      }
    }
    to.bias[0] = to.bias[1] = 0.f;
    const void* const bias = PRODUCT == 1 ? p_.bias1 : p_.bias2;
    if (bias == nullptr || at.chunk != 0) return;
    const bool is_paired = PRODUCT == 1 && is_gated_;
    const int64_t row = int64_t(work_.active[at.active]) * (PRODUCT == 1 ? rows1_ : p_.hidden) + at.row + lane / 4;
    const int64_t low = row + (PRODUCT == 1 ? gate_ : 0), high = is_paired ? row : low + 8;
    if (lane / 4 < at.rows) to.bias[0] = Load16(bias, low, p_.output_element);
    if (lane / 4 + (is_paired ? 0 : 8) < at.rows) to.bias[1] = Load16(bias, high, p_.output_element);
  }

  /// Multiply the stages of this warp in a tile, and write its accumulators.
  template <int PRODUCT>
  __device__ __forceinline__ void Tile(CopyOrder<WARPS> at, CopyOrder<WARPS>& ahead, uint32_t& slot, Sums& partial) {
    const int lane = int(threadIdx.x) % 32;
    float total[TILES][4] = {};
    Operands<Weights, TILES> operands, next;
    if (at.HasStage(work_)) Load<PRODUCT>(at, operands);
#pragma unroll 1
    while (at.HasStage(work_)) {
      const int active = at.active;
      at.NextStage(work_);
      if (at.HasStage(work_)) Load<PRODUCT>(at, next);
      ptx::CopyWait<STAGES - 2>();
      __syncwarp();  // all lanes have the stage, and have read the one before
      Request(ahead, slot == 0 ? STAGES - 1 : slot - 1);
      float sums[TILES][4] = {};
      Weights::Multiply(ring_ + slot * Weights::BYTES, operands.tokens, sums);
      slot = slot == STAGES - 1 ? 0 : slot + 1;
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = sums[t][i] + operands.bias[i / 2];
          if (PRODUCT == 1) {
            total[t][i] += x;
          } else {  // weights that are not finite reach no other token
            const Choice& choice = choices_.of[active][t * 8 + lane % 4 * 2 + i % 2];
            if (choice.pair >= 0) total[t][i] += choice.factor * x;
          }
        }
      }
      operands = next;
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      *reinterpret_cast<float4*>(&partial[at.Part()][t * 128 + lane * 4]) =
          float4{total[t][0], total[t][1], total[t][2], total[t][3]};
    }
    __syncthreads();
  }

  /// Add the warps' accumulators, in the order of their parts.
  __device__ __forceinline__ static float Sum(const Sums& partial, int index) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += partial[i][index];
    return x;
  }

  /// Write the hidden values of a tile.
  __device__ __forceinline__ void Finish1(const CopyOrder<WARPS>& at, const Sums& partial) const {
    const int each = is_gated_ ? 2 : 4;  // values of a lane
    for (int i = int(threadIdx.x); i < TILES * 32 * each; i += THREADS) {
      const int lane = i / each % 32, part = i % each, tile = i / each / 32, index = tile * 128 + lane * 4 + part;
      const int in_tile = lane / 4 + part / 2 * 8, token = tile * 8 + lane % 4 * 2 + part % 2;
      const int pair = choices_.of[at.active][token].pair, row = at.row + in_tile;
      if (in_tile >= at.rows || pair < 0) continue;
      const float gate = Sum(partial, index), up = is_gated_ ? Sum(partial, index + 2) : 0.f;
      const float h = ActivateValue(p_.activation.type, memory_.constants[at.active], gate, up);
      Store16(p_.hidden_values, int64_t(pair) * p_.intermediate + row, p_.element, h);
    }
  }

  /// Write the outputs of a tile.
  __device__ __forceinline__ void Finish2(const CopyOrder<WARPS>& at, const Sums& partial) const {
    for (int i = int(threadIdx.x); i < TILES * 128; i += THREADS) {
      const int lane = i / 4 % 32, part = i % 4;
      const int in_tile = lane / 4 + part / 2 * 8, token = i / 128 * 8 + lane % 4 * 2 + part % 2;
      if (in_tile >= at.rows || token >= p_.tokens) continue;
      Store16(p_.output, token * p_.output_stride + at.row + in_tile, p_.output_element, Sum(partial, i));
    }
  }

  const MonoParams& p_;
  Memory<Weights, TILES>& memory_;
  const Choices<TILES * 8>& choices_;
  const bool is_gated_;
  Work work_;
  int rows1_, gate_;  // rows of an expert's first weights; the first row of gate, in [up ; gate]
  uint32_t ring_;
};

template <typename Weights, int TILES>
__global__ void __launch_bounds__(Weights::WARPS * 32, 1) MonoKernel(const __grid_constant__ MonoParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& memory = *reinterpret_cast<Memory<Weights, TILES>*>(shared_memory);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  FindChoices(p, memory.choices);
  Block<Weights, TILES>(p, memory).Run(grid_barrier);
}

/// Enqueue KERNEL, of so many threads and bytes of shared memory per block.
template <auto* KERNEL, int THREADS, int BYTES>
Status Launch(const MonoParams& p, Stream stream) {
  // More than half of the shared memory of an SM: two grids must not be on an SM at once, since they share a barrier.
  constexpr int SHARED_BYTES = std::max(BYTES, 115 * 1024);
  const int blocks = device::MaxActiveBlocksOf<KERNEL, THREADS, SHARED_BYTES>();
  if (blocks == 0) return cudaErrorNotSupported;
  const dim3 grid(blocks), block(THREADS);
  LaunchConfig config(grid, block, SHARED_BYTES, false, stream);
  config.SetCooperative();  // otherwise two such grids at once might wait for each other for ever
  const Status status = config.Launch(KERNEL, p);
  if (status != cudaErrorCooperativeLaunchTooLarge) return status;
  cudaGetLastError();  // clear it: a context with a part of the SMs
  return cudaErrorNotSupported;
}

}  // namespace mono

/// TILES of 8 tokens. Layers of more than MONO_TOKENS take less time in stages.
template <typename Weights, int TILES = MONO_TOKENS / 8>
Status LaunchMono(const MonoParams& p, Stream stream) {
  if (p.tokens > TILES * 8) return cudaErrorNotSupported;
  constexpr int THREADS = Weights::WARPS * 32, BYTES = sizeof(mono::Memory<Weights, TILES>);
  return mono::Launch<mono::MonoKernel<Weights, TILES>, THREADS, BYTES>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
