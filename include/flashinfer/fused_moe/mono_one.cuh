// SPDX-License-Identifier: Apache-2.0
// mono.cuh for one token and weights that must be decoded, where instructions take longer than memory: the operands of each
// product are prepared once, in shared memory and in the order of the tensor cores' registers, and a lane keeps two sums. The
// format says how (mono_fp8_one.cuh). MXFP4 has a kernel of its own (mono_mxfp4_one.cuh).
#pragma once
#include "mono.cuh"
#include "mono_route.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int ONE_OPERAND_BYTES = 64 * 1024;  // shared memory for the operands of a product

/// Sums of the warps of one tile.
template <typename Weights>
using OneSums = float[Weights::WARPS][TILE_ROWS];

template <typename Weights>
struct alignas(128) OneMemory : BaseMemory<Weights, 8> {
  OneSums<Weights> sums[2];
  unsigned char zeros[16];  // what lanes without a part of an operand read
  alignas(16) unsigned char operands[ONE_OPERAND_BYTES];
};

/// Return true if operands of both products have room.
template <typename Weights>
bool HasRoomForOne(const MonoParams& p) {
  const auto bytes = [](int64_t columns) {
    return (columns + Weights::COLUMNS - 1) / Weights::COLUMNS * Weights::OPERAND_BYTES;
  };
  return p.tokens == 1 && bytes(p.hidden) <= ONE_OPERAND_BYTES && p.top_k * bytes(p.intermediate) <= ONE_OPERAND_BYTES;
}

/// A block's share of a layer.
template <typename Weights>
class OneBlock : public BaseBlock<Weights, 8> {
 public:
  using Base = BaseBlock<Weights, 8>;
  using T = typename Weights::Element;
  using Sums = OneSums<Weights>;
  using Base::WARPS, Base::STAGES;

  __device__ __forceinline__ OneBlock(const MonoParams& p, OneMemory<Weights>& memory) : Base(p, memory), one_(memory) {
    zeros_ = ptx::SharedAddress(memory.zeros), operands_ = ptx::SharedAddress(memory.operands);
  }

  /// Compute the share; `meanwhile` is called when the first weights have been requested.
  template <typename F>
  __device__ __forceinline__ void Run(int32_t& barrier, const F& meanwhile) {
    const int warp = int(threadIdx.x) / 32;
    Walk<WARPS> ahead(work_, warp, 1);
    ahead.SkipEmpty(work_);
    uint32_t slot = 0;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) this->Request(ahead, i);
    this->FindConstants(one_.constants);
    meanwhile();
    if (threadIdx.x < sizeof(one_.zeros) / 4) reinterpret_cast<uint32_t*>(one_.zeros)[threadIdx.x] = 0;
    Prepare<1>();
    int tiles = 0;
    for (Walk<WARPS> at(work_, warp, 1); at.product == 1 && !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<1>(at, ahead, slot, one_.sums[tiles % 2]);
      Finish1(at, one_.sums[tiles % 2]);
    }
    SyncGrid(barrier);
    Prepare<2>();
    for (Walk<WARPS> at(work_, warp, 2); !at.IsDone(); at.NextTile(work_), ++tiles) {
      Tile<2>(at, ahead, slot, one_.sums[tiles % 2]);
      Finish2(at, one_.sums[tiles % 2]);
    }
  }

 private:
  using Base::choices_, Base::gate_, Base::is_gated_, Base::p_, Base::ring_, Base::rows1_, Base::work_;

  /// Write the operands of a product to shared memory: the token, or the hidden values of each expert in use.
  template <int PRODUCT>
  __device__ __forceinline__ void Prepare() {
    const int columns = PRODUCT == 1 ? p_.hidden : p_.intermediate;
    const int chunks = PRODUCT == 1 ? work_.chunks1 : work_.chunks2;
    const int count = chunks * (PRODUCT == 1 ? 1 : work_.active_count);
#pragma unroll 1
    for (int i = int(threadIdx.x) / 32; i < count; i += WARPS) {
      const int active = i / chunks;
      const T* x = static_cast<const T*>(p_.input);
      if (PRODUCT == 2) {
        x = static_cast<const T*>(p_.hidden_values) + int64_t(choices_.of[active][0].pair) * p_.intermediate;
      }
      Weights::template Prepare<PRODUCT>(operands_ + i * Weights::OPERAND_BYTES, x, i - active * chunks, columns);
    }
    __syncthreads();
  }

  /// Load what product 2 adds to the sums of rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ float2 Bias2(const Walk<WARPS>& at) const {
    const int lane = int(threadIdx.x) % 32, in_tile = lane / 4;
    float2 to{};
    if (p_.bias2 == nullptr || at.chunk != 0 || lane % 4 != 0) return to;
    const int64_t row = int64_t(work_.active[at.active]) * p_.hidden + at.row + in_tile;
    if (in_tile < at.rows) to.x = Load16(p_.bias2, row, p_.output_element);
    if (in_tile + 8 < at.rows) to.y = Load16(p_.bias2, row + 8, p_.output_element);
    return to;
  }

  /// Round the sums of product 1 to bf16, and add their biases.
  __device__ __forceinline__ void RoundSums(int expert, int row, float& gate, float& up) const {
    gate = __bfloat162float(__float2bfloat16_rn(gate)), up = __bfloat162float(__float2bfloat16_rn(up));
    if (p_.bias1 == nullptr) return;
    const int64_t first = int64_t(expert) * rows1_ + row;
    gate += Load16(p_.bias1, first + gate_, p_.output_element);
    if (is_gated_) up += Load16(p_.bias1, first, p_.output_element);
  }

  /// Multiply the stages of this warp in a tile, and write its sums.
  template <int PRODUCT>
  __device__ __forceinline__ void Tile(Walk<WARPS> at, Walk<WARPS>& ahead, uint32_t& slot, Sums& to) {
    const int lane = int(threadIdx.x) % 32;
    float total[2] = {};
#pragma unroll 1
    while (at.HasStage(work_)) {
      const uint32_t operand =
          operands_ + (PRODUCT == 1 ? at.chunk : at.active * work_.chunks2 + at.chunk) * Weights::OPERAND_BYTES;
      const float2 bias = PRODUCT == 1 ? float2{} : Bias2(at);
      const float factor = PRODUCT == 1 ? 1.f : choices_.of[at.active][0].factor;
      ptx::CopyWait<STAGES - 2>();
      __syncwarp();  // all lanes have the stage, and have read the one before
      this->Request(ahead, slot == 0 ? STAGES - 1 : slot - 1);
      float2 x = Weights::MultiplyOne(ring_ + slot * Weights::BYTES, operand, zeros_);
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      x.x += bias.x, x.y += bias.y;
      if (PRODUCT == 2) {
        total[0] += factor * x.x, total[1] += factor * x.y;
      } else {
        total[0] += x.x, total[1] += x.y;
      }
      at.NextStage(work_);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = total[i];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (lane % 4 == 0) to[at.Part()][i * 8 + lane / 4] = x;
    }
    __syncthreads();
  }

  /// Add the warps' sums, in the order of their parts.
  __device__ __forceinline__ static float Sum(const Sums& sums, int index) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += sums[i][index];
    return x;
  }

  /// Write the hidden values of a tile.
  __device__ __forceinline__ void Finish1(const Walk<WARPS>& at, const Sums& sums) const {
    const int i = int(threadIdx.x), row = at.row + i;
    if (i >= at.rows) return;
    float gate = Sum(sums, i), up = is_gated_ ? Sum(sums, i + 8) : 0.f;
    RoundSums(work_.active[at.active], row, gate, up);
    const float h = ActivateValue(p_.activation.type, one_.constants[at.active], gate, up);
    const int64_t first = int64_t(choices_.of[at.active][0].pair) * p_.intermediate;
    Store16(p_.hidden_values, first + row, p_.element, h);
  }

  /// Write the outputs of a tile.
  __device__ __forceinline__ void Finish2(const Walk<WARPS>& at, const Sums& sums) const {
    const int i = int(threadIdx.x);
    if (i < at.rows) Store16(p_.output, at.row + i, p_.output_element, Sum(sums, i));
  }

  OneMemory<Weights>& one_;
  uint32_t zeros_, operands_;
};

template <typename Weights, bool ROUTES>
__global__ void __launch_bounds__(Weights::WARPS * 32, 1) OneKernel(const __grid_constant__ MonoParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& memory = *reinterpret_cast<OneMemory<Weights>*>(shared_memory);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  if constexpr (ROUTES) {
    static_assert(sizeof(memory.ring) >= sizeof(RouteKeys));
    const Routed routed = RouteOneToken(p, memory.choices, *reinterpret_cast<RouteKeys*>(memory.ring));
    OneBlock<Weights>(p, memory).Run(grid_barrier, [&] { WriteFactors(p, routed); });
  } else {
    FindChoices(p, memory.choices);
    OneBlock<Weights>(p, memory).Run(grid_barrier, [] {});
  }
}

template <typename Weights, bool ROUTES>
Status LaunchOne(const MonoParams& p, Stream stream) {
  return Launch<OneKernel<Weights, ROUTES>, Weights::WARPS * 32, sizeof(OneMemory<Weights>)>(p, stream);
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
