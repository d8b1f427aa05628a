// SPDX-License-Identifier: Apache-2.0
// A layer of e4m3 weights with scales of 128 x 128 blocks for one token in one launch, like kernel.cuh, where
// instructions take as long as memory:
// - A warp keeps 128 columns for many rows (fp8_order.cuh), with their elements in registers. Warps meet at the end of
//   a batch of tiles only.
// - The token is requested ahead of the weights, so that it does not wait for them. Each warp quantises the columns that
//   it multiplies, by 1 x 128.
// - Numbers of e4m3 are multiplied as fp16, which holds them: sums are fp32, where Hopper's own products of e4m3 keep
//   fewer bits.
//   test  pytest tests/fused_moe/test_emulated_mono.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/prefetch.cuh"
#include "kernel.cuh"
#include "fp8_order.cuh"
#include "route.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int FP8_BATCH = 16;  // tiles whose sums are in shared memory at once
struct Fp8Batches {
  __device__ __forceinline__ static int Tiles(int) { return FP8_BATCH; }
};

/// Shared memory of a block.
struct alignas(128) Fp8Memory {
  unsigned char ring[FP8_WARPS][FP8_STAGES][FP8_STAGE_BYTES];
  uint32_t codes[FP8_WARPS][FP8_COLUMNS / 2];       // fp16, from the lanes that quantise to those that multiply
  float sums[FP8_BATCH][FP8_WARPS][TILE_ROWS + 1];  // a float more than rows, so that tiles are in different banks
  TokenExperts experts[FP8_WARPS];                  // with routing in the kernel, all warps use the first one
  ActivationConstants constants[TOKEN_MAX_SLOTS];
};

/// A block's share of a layer.
class Fp8Block {
 public:
  /// Begin with the experts that the token has chosen; `elements` is what LoadToken() returned.
  __device__ __forceinline__ Fp8Block(const MonoParams& p, Fp8Memory& memory, const TokenExperts& experts, int count,
                                      const uint2& elements)
      : p_(p),
        memory_(memory),
        experts_(experts),
        elements_(elements),
        requests_(p, experts.expert, count, {}),
        ring_(ptx::SharedAddress(memory.ring[threadIdx.x / 32])) {}

  /// Load the first elements of the token that this warp multiplies, and prefetch the others.
  __device__ __forceinline__ static uint2 LoadToken(const MonoParams& p) {
    const int lane = int(threadIdx.x) % 32, first = int(threadIdx.x) / 32 * FP8_COLUMNS;
    for (int chunk = first + FP8_WARPS * FP8_COLUMNS; chunk < p.hidden; chunk += FP8_WARPS * FP8_COLUMNS) {
      const int column = chunk + lane * (FP8_COLUMNS / 2);  // two cache lines
      if (lane < 2 && column < p.hidden) ptx::PrefetchL2(static_cast<const __nv_bfloat16*>(p.input) + column);
    }
    return LoadColumns<1>(p.input, first, p.hidden);
  }

  /// Compute the share; `meanwhile` is called when the first weights have been requested.
  template <typename F>
  __device__ __forceinline__ void Run(int32_t& barrier, const F& meanwhile) {
#pragma unroll 1
    for (int i = 0; i < FP8_STAGES - 1; ++i) requests_.Next(ring_ + i * FP8_STAGE_BYTES);
    for (int i = int(threadIdx.x); i < requests_.work.count; i += THREADS) {
      memory_.constants[i] = ConstantsOf(p_.activation, experts_.expert[i]);
    }
    meanwhile();
    Product<1>(elements_);
    SyncGrid(barrier);
    Product<2>(LoadElementsOf<2>(0));
  }

 private:
  static constexpr int THREADS = FP8_WARPS * 32;
  /// Operand of a lane: fp16 codes in the lanes of column 0 of the tensor cores, zeros in others.
  struct Operand {
    uint32_t codes[4][4];
    float scale;
  };

  template <int PRODUCT>
  __device__ __forceinline__ const Fp8Share& Of() const {
    return PRODUCT == 1 ? requests_.work.first : requests_.work.second;
  }
  /// Load four elements of the 128 columns from `first` on, of `columns`.
  template <int PRODUCT>
  __device__ __forceinline__ static uint2 LoadColumns(const void* row, int first, int columns) {
    const int column = first + int(threadIdx.x) % 32 * 4;
    if (column >= columns) return {};
    return LoadElements<PRODUCT, uint2>(static_cast<const __nv_bfloat16*>(row) + column);
  }
  /// Load four elements of a source of this warp.
  template <int PRODUCT>
  __device__ __forceinline__ uint2 LoadElementsOf(int pass) const {
    const int source = pass * FP8_WARPS + int(threadIdx.x) / 32, chunks = Of<PRODUCT>().chunks;
    if (source >= Of<PRODUCT>().sources) return {};
    if (PRODUCT == 1) return LoadColumns<1>(p_.input, source * FP8_COLUMNS, p_.hidden);
    const int active = source / chunks;
    const auto* x =
        static_cast<const __nv_bfloat16*>(p_.hidden_values) + int64_t(experts_.slot[active]) * p_.intermediate;
    return LoadColumns<2>(x, (source - active * chunks) * FP8_COLUMNS, p_.intermediate);
  }

  /// Quantise the elements of a source.
  __device__ __forceinline__ void MakeOperand(const uint2& elements, Operand& to) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    const int lane = int(threadIdx.x) % 32;
    const float values[4] = {__uint_as_float(elements.x << 16), __uint_as_float(elements.x & 0xffff0000u),
                             __uint_as_float(elements.y << 16), __uint_as_float(elements.y & 0xffff0000u)};
    float amax = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
#pragma unroll
    for (int i = 1; i < 32; i *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    to.scale = 1.f / q;
    const uint32_t codes = ptx::SharedAddress(memory_.codes[threadIdx.x / 32]);
    __syncwarp();  // the codes of the source before were read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t pair = uint16_t(Fp8Pair(values[2 * i] * q, values[2 * i + 1] * q, __NV_E4M3));
      ptx::StoreShared4(codes + lane * 8 + i * 4, ptx::HalvesOfE4M3(pair));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 columns of each half of the source
      uint32_t words[4] = {};
      if (lane < 4) ptx::LoadFragment(words, codes + i / 2 * 128 + lane * 32 + i % 2 * 16);
#pragma unroll
      for (int word = 0; word < 4; ++word) to.codes[i][word] = words[word];
    }
#endif
  }

  /// Compute a product of this block's rows, in batches; `next` are the elements of pass 0.
  template <int PRODUCT>
  __device__ __forceinline__ void Product(uint2 next) {
    const int tiles = Of<PRODUCT>().Tiles(), passes = Of<PRODUCT>().Passes(int(threadIdx.x) / 32);
#pragma unroll 1
    for (int batch = 0; batch < tiles; batch += FP8_BATCH) {
      const int end = min(tiles, batch + FP8_BATCH);
      if (batch > 0) {
        __syncthreads();  // sums of the batch before were read
        next = LoadElementsOf<PRODUCT>(0);
      }
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        Operand x;
        MakeOperand(next, x);
        if (pass + 1 < passes) next = LoadElementsOf<PRODUCT>(pass + 1);
        Pass<PRODUCT>(pass, end - batch, x);
      }
      __syncthreads();
      Finish<PRODUCT>(batch, end);
    }
  }

  /// Multiply the stages of a source, and add to the accumulators of this warp.
  template <int PRODUCT>
  __device__ __forceinline__ void Pass(int pass, int tiles, const Operand& x) {
    const int lane = int(threadIdx.x) % 32;
    float factor = x.scale;
    if (PRODUCT == 2) {
      factor *= experts_.factor[(pass * FP8_WARPS + int(threadIdx.x) / 32) / requests_.work.second.chunks];
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      ptx::CopyWait<FP8_STAGES - 2>();
      __syncwarp();  // all lanes have the stage, and have read the one before
      requests_.Next(ring_ + (slot_ == 0 ? FP8_STAGES - 1 : slot_ - 1) * FP8_STAGE_BYTES);
      float2 sum = Multiply(ring_ + slot_ * FP8_STAGE_BYTES, x);
      slot_ = slot_ == FP8_STAGES - 1 ? 0 : slot_ + 1;
      if (lane % 4 != 0) continue;
      float* const to = &memory_.sums[tile][threadIdx.x / 32][lane / 4];
      sum.x *= factor, sum.y *= factor;
      if (pass > 0) sum.x += to[0], sum.y += to[8];
      to[0] = sum.x, to[8] = sum.y;
    }
  }

  /// Return sums of rows lane / 4 and lane / 4 + 8 without the operand's scale, in lanes of lane % 4 == 0.
  __device__ __forceinline__ static float2 Multiply(uint32_t stage, const Operand& x) {
    float2 result{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    const int lane = int(threadIdx.x) % 32;
    const uint32_t of_rows = stage + STAGE_BYTES + lane / 4 * 4;
    const float low_scale = __uint_as_float(ptx::LoadShared4(of_rows));
    const float high_scale = __uint_as_float(ptx::LoadShared4(of_rows + 32));
    float sums[2][4] = {};  // two chains of products
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t low[4], high[4];
      ptx::LoadFragment(low, InStage(stage, lane / 4, 4 * g + lane % 4));
      ptx::LoadFragment(high, InStage(stage, lane / 4 + 8, 4 * g + lane % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a[4] = {ptx::HalvesOfE4M3(uint16_t(low[i])), ptx::HalvesOfE4M3(uint16_t(high[i])),
                               ptx::HalvesOfE4M3(uint16_t(low[i] >> 16)), ptx::HalvesOfE4M3(uint16_t(high[i] >> 16))};
        const uint32_t (&codes)[4] = x.codes[2 * g + i / 2];
        ptx::Mma<__half>(sums[i % 2], a, codes[i % 2 * 2], codes[i % 2 * 2 + 1]);
      }
    }
    result = {(sums[0][0] + sums[1][0]) * low_scale, (sums[0][2] + sums[1][2]) * high_scale};
#endif
    return result;
  }

  /// Add the warps' accumulators of a row of a tile, in the order of their sources.
  __device__ __forceinline__ float Sum(int parts, int tile, int row) const {
    float x = 0.f;
#pragma unroll 8
    for (int warp = 0; warp < parts; ++warp) x += memory_.sums[tile][warp][row];
    return x;
  }

  /// Write the hidden values or the outputs of a batch of tiles.
  template <int PRODUCT>
  __device__ __forceinline__ void Finish(int batch, int end) const {
    const Fp8Share& share = Of<PRODUCT>();
    const int parts = min(FP8_WARPS, share.sources), first = share.begin + batch * share.height;
    const int count = min((end - batch) * share.height, share.end - first);
    for (int i = int(threadIdx.x); i < count; i += THREADS) {
      const int tile = i / share.height, row = i % share.height, at = first + i;
      if (PRODUCT == 2) {
        Store16(p_.output, at, p_.output_element, Sum(parts, tile, row) + Bias2(at));
        continue;
      }
      const int active = at / requests_.work.units, in_expert = at - active * requests_.work.units;
      const float low = Sum(parts, tile, row), high = Sum(parts, tile, row + 8);
      if (requests_.work.is_gated) {
        WriteHidden(active, in_expert, Rounded(active, p_.intermediate + in_expert, low),
                    Rounded(active, in_expert, high));
      } else {
        WriteHidden(active, in_expert, Rounded(active, in_expert, low), 0.f);
        WriteHidden(active, in_expert + requests_.work.units, Rounded(active, in_expert + requests_.work.units, high),
                    0.f);
      }
    }
  }

  /// Return a sum of GEMM 1 rounded to bf16, plus its bias.
  __device__ __forceinline__ float Rounded(int active, int row, float x) const {
    x = __bfloat162float(__float2bfloat16_rn(x));
    if (p_.bias1 == nullptr) return x;
    const int64_t rows = (requests_.work.is_gated ? 2 : 1) * p_.intermediate;
    return x + Load16(p_.bias1, experts_.expert[active] * rows + row, p_.output_element);
  }
  __device__ __forceinline__ void WriteHidden(int active, int row, float gate, float up) const {
    const float h = ActivateValue(p_.activation.type, memory_.constants[active], gate, up);
    const int64_t first = int64_t(experts_.slot[active]) * p_.intermediate;
    Store16(p_.hidden_values, first + row, p_.element, h);
  }
  /// Return the sum over experts of the biases of GEMM 2.
  __device__ __forceinline__ float Bias2(int row) const {
    float x = 0.f;
    if (p_.bias2 == nullptr) return x;
    for (int e = 0; e < requests_.work.count; ++e) {
      x += experts_.factor[e] * Load16(p_.bias2, int64_t(experts_.expert[e]) * p_.hidden + row, p_.output_element);
    }
    return x;
  }

  const MonoParams& p_;
  Fp8Memory& memory_;
  const TokenExperts& experts_;
  const uint2 elements_;
  Fp8Requests<true, Fp8Batches> requests_;
  const uint32_t ring_;
  uint32_t slot_ = 0;
};

template <bool ROUTES>
__global__ void __launch_bounds__(FP8_WARPS * 32, 1) Fp8OneKernel(const __grid_constant__ MonoParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& memory = *reinterpret_cast<Fp8Memory*>(shared_memory);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint2 elements = Fp8Block::LoadToken(p);  // ahead of all that waits
  if constexpr (ROUTES) {
    static_assert(sizeof(memory.ring) >= sizeof(RouteKeys) && MOE_ROUTE_MAX_TOP_K <= TOKEN_MAX_SLOTS);
    TokenExperts& experts = memory.experts[0];
    const Routed routed = RouteOneToken(p, experts, *reinterpret_cast<RouteKeys*>(memory.ring));
    Fp8Block(p, memory, experts, p.top_k, elements).Run(grid_barrier, [&] { WriteFactors(p, routed); });
  } else {
    TokenExperts& experts = memory.experts[threadIdx.x / 32];
    const int count = FindExperts(p, experts);
    Fp8Block(p, memory, experts, count, elements).Run(grid_barrier, [] {});
  }
}

}  // namespace mono

FLASHINFER_INLINE Status MonoFp8Block(const MonoParams& p, Stream stream) {
  using mono::Fp8Memory, mono::Fp8OneKernel, mono::FP8_WARPS, mono::Launch;
  if (p.tokens > 1) return MonoFp8Few(p, true, stream);
  if (p.top_k > mono::TOKEN_MAX_SLOTS) return cudaErrorNotSupported;
  return p.routing.logits != nullptr ? Launch<Fp8OneKernel<true>, FP8_WARPS * 32, sizeof(Fp8Memory)>(p, stream)
                                     : Launch<Fp8OneKernel<false>, FP8_WARPS * 32, sizeof(Fp8Memory)>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
