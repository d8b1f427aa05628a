// SPDX-License-Identifier: Apache-2.0
// The kernel of fp8_one.cuh for up to 8 tokens: tokens are the columns of the tensor cores, so that weights are decoded
// as often as for one token. It has two forms: of scales by 128 x 128 blocks, and of one factor per expert (IS_BLOCK
// false), whose tokens and hidden values are codes already.
// - A warp keeps 128 columns of all tokens. A lane loads and quantises what it multiplies, 32 elements of a token.
// - GEMM 1 multiplies the rows of an expert by all tokens; sums of tokens that have not chosen it are left out.
// - The sums of GEMM 2 are kept for each token, expert and remainder of the chunk's number, so that neither their
//   order nor their bits depend on the other tokens.
//   test  pytest tests/fused_moe/test_emulated_mono.py      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/prefetch.cuh"
#include "kernel.cuh"
#include "fp8_order.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int FEW_TOKENS = 8;
constexpr int FEW_SUMS = 18 * 1024;                                // floats of shared memory
constexpr int FEW_TILE_SUMS = FP8_WARPS * TILE_ROWS * FEW_TOKENS;  // floats of a tile of GEMM 1
constexpr int FEW_BATCH = FEW_SUMS / FEW_TILE_SUMS;                // tiles of GEMM 1 whose sums are there at once
constexpr int FEW_SLOT_SUMS = TILE_ROWS + 1;  // floats of a slot of GEMM 2, in other banks than the next
constexpr int FEW_ROUNDS = 16;                // most remainders of a chunk's number
static_assert(FP8_WARPS == FEW_ROUNDS, "chunks of one expert with equal remainders are one warp's");

/// Return how many slots of sums a tile of GEMM 2 has: one for each pair of token and expert, and remainder.
__host__ __device__ __forceinline__ int FewSlots(const MonoParams& p) {
  const int chunks = (p.intermediate + FP8_COLUMNS - 1) / FP8_COLUMNS;
  return p.tokens * p.top_k * (chunks < FEW_ROUNDS ? chunks : FEW_ROUNDS);
}

/// Tiles whose sums are in shared memory at once, by product.
struct FewBatches {
  int second;

  __device__ __forceinline__ static int Of(const MonoParams& p) {
    return min(FEW_BATCH, FEW_SUMS / (FEW_SLOT_SUMS * FewSlots(p)));
  }
  __device__ __forceinline__ int Tiles(int product) const { return product == 1 ? FEW_BATCH : second; }
};

/// Return the products of a stage by the 8 columns of an operand, whose scales are left out: in a lane those of rows lane / 4
/// (x, y) and lane / 4 + 8 (z, w) by columns lane % 4 * 2 and the next one. The kernel for one token has a product of its own:
/// with this one its 128 registers spill.
template <bool IS_BLOCK>
__device__ __forceinline__ float4 MultiplyFp8Stage(uint32_t stage, const uint32_t (&operand)[4][4]) {
  float4 result{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  const int lane = int(threadIdx.x % 32);
  const uint32_t of_rows = stage + STAGE_BYTES + lane / 4 * 4;
  const float low_scale = IS_BLOCK ? __uint_as_float(ptx::LoadShared4(of_rows)) : 1.f;
  const float high_scale = IS_BLOCK ? __uint_as_float(ptx::LoadShared4(of_rows + 32)) : 1.f;
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
      const uint32_t (&codes)[4] = operand[2 * g + i / 2];
      ptx::Mma<__half>(sums[i % 2], a, codes[i % 2 * 2], codes[i % 2 * 2 + 1]);
    }
  }
  result = {(sums[0][0] + sums[1][0]) * low_scale, (sums[0][1] + sums[1][1]) * low_scale,
            (sums[0][2] + sums[1][2]) * high_scale, (sums[0][3] + sums[1][3]) * high_scale};
#endif
  return result;
}

/// Experts of each token, ascending, as numbers among those in use.
struct TokenLists {
  uint8_t active[FEW_TOKENS][MONO_MAX_PAIRS];
  int count[FEW_TOKENS];
};

/// Shared memory of a block.
struct alignas(128) FewMemory {
  unsigned char ring[FP8_WARPS][FP8_STAGES][FP8_STAGE_BYTES];
  float sums[FEW_SUMS];
  Choices<FEW_TOKENS> choices;
  TokenLists lists;
  ActivationConstants constants[MONO_MAX_PAIRS];  // one entry per expert in use
};

/// A block's share of a layer.
template <bool IS_BLOCK>
class Fp8FewBlock {
 public:
  static constexpr int BYTES = IS_BLOCK ? 2 : 1;  // bytes of an element of a token, and of a hidden value
  /// Elements of the token of a lane, lane / 4: 16 columns of each half of a source, from lane % 4 * 16 on.
  struct Elements {
    uint4 of[2][BYTES];
  };

  /// Begin with the experts in `memory.choices`.
  __device__ __forceinline__ Fp8FewBlock(const MonoParams& p, FewMemory& memory)
      : p_(p),
        memory_(memory),
        choices_(memory.choices),
        requests_(p, memory.choices.active, memory.choices.count, {FewBatches::Of(p)}),
        ring_(ptx::SharedAddress(memory.ring[threadIdx.x / 32])) {}

  /// Load the first elements of the tokens that this warp multiplies, and prefetch the others.
  __device__ __forceinline__ static Elements LoadTokens(const MonoParams& p) {
    const int lane = int(threadIdx.x % 32), first = int(threadIdx.x / 32) * FP8_COLUMNS;
    for (int chunk = first + FP8_WARPS * FP8_COLUMNS; chunk < p.hidden; chunk += FP8_WARPS * FP8_COLUMNS) {
      const int token = lane / BYTES, column = chunk + lane % BYTES * (FP8_COLUMNS / BYTES);  // a cache line of a token
      if (token < p.tokens && column < p.hidden) ptx::PrefetchL2(TokenOf(p, token) + column * BYTES);
    }
    return LoadColumns<1>(TokenOf(p, lane / 4), first, p.hidden);
  }

  /// Compute the share; `elements` is what LoadTokens() returned. They wait in the stage that is requested last: registers are
  /// few.
  __device__ __forceinline__ void Run(int32_t& barrier, const Elements& elements) {
    *First() = elements;
#pragma unroll 1
    for (int i = 0; i < FP8_STAGES - 1; ++i) requests_.Next(ring_ + i * FP8_STAGE_BYTES);
    ListExperts();
    Product<1>();
    SyncGrid(barrier);
    Product<2>();
  }

 private:
  static constexpr int THREADS = FP8_WARPS * 32;
  static_assert(sizeof(Elements) * 32 <= FP8_STAGE_BYTES);

  /// Return the place where a lane's elements of the first pass wait.
  __device__ __forceinline__ Elements* First() const {
    auto* const stage = memory_.ring[threadIdx.x / 32][FP8_STAGES - 1];
    return reinterpret_cast<Elements*>(stage) + threadIdx.x % 32;
  }

  /// Codes of a lane as fp16, and the scale of its token.
  struct Operand {
    uint32_t codes[4][4];
    float scale;
  };

  template <int PRODUCT>
  __device__ __forceinline__ const Fp8Share& Of() const {
    return PRODUCT == 1 ? requests_.work.first : requests_.work.second;
  }

  /// Write the tables that are read behind the first barrier.
  __device__ __forceinline__ void ListExperts() {
    for (int i = int(threadIdx.x); i < choices_.count; i += THREADS) {
      memory_.constants[i] = ConstantsOf(p_.activation, choices_.active[i]);
    }
    const int token = THREADS - 1 - int(threadIdx.x);  // a warp that loads few of the constants
    if (token >= p_.tokens) return;
    int count = 0;
#pragma unroll 4
    for (int i = 0; i < choices_.count; ++i) {
      if (choices_.of[i][token].pair >= 0) memory_.lists.active[token][count++] = uint8_t(i);
    }
    memory_.lists.count[token] = count;
  }

  /// Return the row of a token, null if there is none.
  __device__ __forceinline__ static const unsigned char* TokenOf(const MonoParams& p, int token) {
    if (token >= p.tokens) return nullptr;
    return static_cast<const unsigned char*>(p.input) + token * p.input_stride * BYTES;
  }
  /// Load what this lane has of the 128 columns from `first` on, of `columns`; zeros if `row` is null.
  template <int PRODUCT>
  __device__ __forceinline__ static Elements LoadColumns(const unsigned char* row, int first, int columns) {
    Elements to{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = first + half * (FP8_COLUMNS / 2) + int(threadIdx.x % 4) * 16;
      if (row == nullptr || column >= columns) continue;
#pragma unroll
      for (int i = 0; i < BYTES; ++i) to.of[half][i] = LoadElements<PRODUCT, uint4>(row + column * BYTES + i * 16);
    }
    return to;
  }
  /// Load the elements of a source of this warp.
  template <int PRODUCT>
  __device__ __forceinline__ Elements LoadElementsOf(int pass) const {
    const int source = pass * FP8_WARPS + int(threadIdx.x / 32), token = int(threadIdx.x % 32) / 4;
    if (source >= Of<PRODUCT>().sources) return {};
    if (PRODUCT == 1) return LoadColumns<1>(TokenOf(p_, token), source * FP8_COLUMNS, p_.hidden);
    const int chunks = requests_.work.second.chunks, active = source / chunks;
    const int pair = choices_.of[active][token].pair;
    const auto* const row =
        static_cast<const unsigned char*>(p_.hidden_values) + int64_t(pair) * p_.intermediate * BYTES;
    return LoadColumns<2>(pair < 0 ? nullptr : row, (source - active * chunks) * FP8_COLUMNS, p_.intermediate);
  }

  /// Make the operand of a source: elements are quantised by 1 x 128, four lanes have those of a token; codes are as they are.
  __device__ __forceinline__ static void MakeOperand(const Elements& elements, Operand& to) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    if constexpr (!IS_BLOCK) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& of = elements.of[half][0];
        const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          to.codes[2 * half + i / 4][i % 4] = ptx::HalvesOfE4M3(uint16_t(words[i / 2] >> i % 2 * 16));
        }
      }
      return;
    }
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4& of = elements.of[i / 2][i % BYTES];
      const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) amax = fmaxf(amax, fmaxf(fabsf(LowOf(words[j])), fabsf(HighOf(words[j]))));
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1)), amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    to.scale = 1.f / q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4& of = elements.of[i / 2][i % BYTES];
      const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint16_t pair = uint16_t(Fp8Pair(LowOf(words[j]) * q, HighOf(words[j]) * q, __NV_E4M3));
        to.codes[i][j] = ptx::HalvesOfE4M3(pair);
      }
    }
#endif
  }
  __device__ __forceinline__ static float LowOf(uint32_t word) { return __uint_as_float(word << 16); }
  __device__ __forceinline__ static float HighOf(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

  /// Compute a product of this block's rows, in batches. Elements of a pass are loaded when the pass before has ended: the
  /// stages under way take longer to arrive.
  template <int PRODUCT>
  __device__ __forceinline__ void Product() {
    const int tiles = Of<PRODUCT>().Tiles(), passes = Of<PRODUCT>().Passes(int(threadIdx.x / 32));
#pragma unroll 1
    for (int batch = 0; batch < tiles; batch += requests_.Tiles(PRODUCT)) {
      const int end = min(tiles, batch + requests_.Tiles(PRODUCT));
      if (batch > 0) __syncthreads();  // sums of the batch before were read
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        const bool is_first = PRODUCT == 1 && batch == 0 && pass == 0;
        Operand x;
        MakeOperand(is_first ? *First() : LoadElementsOf<PRODUCT>(pass), x);
        if (PRODUCT == 1) {
          Pass1(pass, end - batch, x);
        } else {
          Pass2(pass, end - batch, x);
        }
      }
      __syncthreads();
      if (PRODUCT == 1) {
        Finish1(batch, end);
      } else {
        Finish2(batch, end);
      }
    }
  }

  /// Return the sums of the next stage, with the scales of both sides.
  __device__ __forceinline__ float4 NextSums(const Operand& x) {
    ptx::CopyWait<FP8_STAGES - 2>();
    __syncwarp();  // all lanes have the stage, and have read the one before
    requests_.Next(ring_ + (slot_ == 0 ? FP8_STAGES - 1 : slot_ - 1) * FP8_STAGE_BYTES);
    float4 sums = MultiplyFp8Stage<IS_BLOCK>(ring_ + slot_ * FP8_STAGE_BYTES, x.codes);
    slot_ = slot_ == FP8_STAGES - 1 ? 0 : slot_ + 1;
    if (!IS_BLOCK) return sums;
    const int lane = int(threadIdx.x % 32);  // it has sums of columns lane % 4 * 2 and the next one
    const float low = __shfl_sync(~0u, x.scale, lane % 4 * 8), high = __shfl_sync(~0u, x.scale, lane % 4 * 8 + 4);
    sums.x *= low, sums.y *= high, sums.z *= low, sums.w *= high;
    return sums;
  }

  /// Multiply the stages of a source of GEMM 1, and add to the accumulators of this warp.
  __device__ __forceinline__ void Pass1(int pass, int tiles, const Operand& x) {
    float4* to =
        reinterpret_cast<float4*>(memory_.sums) + int(threadIdx.x);  // memory of a lane, in an order of its own
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, to += THREADS) {
      float4 sums = NextSums(x);
      if (pass > 0) {
        const float4 before = *to;
        sums.x += before.x, sums.y += before.y, sums.z += before.z, sums.w += before.w;
      }
      *to = sums;
    }
  }
  /// Return the place of a sum of GEMM 1 in those of a warp and tile: row and token of the tile.
  __device__ __forceinline__ static int PlaceOf(int row, int token) {
    return (row % 8 * 4 + token / 2) * 4 + row / 8 * 2 + token % 2;
  }

  /// Multiply the stages of a source of GEMM 2, and add to the slots of the tokens that have chosen its expert.
  __device__ __forceinline__ void Pass2(int pass, int tiles, const Operand& x) {
    const int lane = int(threadIdx.x % 32), source = pass * FP8_WARPS + int(threadIdx.x / 32);
    const int chunks = requests_.work.second.chunks, active = source / chunks, chunk = source - active * chunks;
    const int first = (chunk % FEW_ROUNDS) * FEW_SLOT_SUMS + lane / 4, stride = FewSlots(p_) * FEW_SLOT_SUMS;
    const int pairs[2] = {choices_.of[active][lane % 4 * 2].pair, choices_.of[active][lane % 4 * 2 + 1].pair};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const float4 sums = NextSums(x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pairs[i] < 0) continue;  // the token has not chosen the expert
        float* const to = memory_.sums + tile * stride + SlotOf(pairs[i], 0) + first;
        float low = i == 0 ? sums.x : sums.y, high = i == 0 ? sums.z : sums.w;
        if (chunk >= FEW_ROUNDS) low += to[0], high += to[8];
        to[0] = low, to[8] = high;
      }
    }
  }
  /// Return how many remainders the chunks of an expert have.
  __device__ __forceinline__ int Rounds() const { return min(FEW_ROUNDS, requests_.work.second.chunks); }
  __device__ __forceinline__ int SlotOf(int pair, int round) const { return (pair * Rounds() + round) * FEW_SLOT_SUMS; }

  /// Write the hidden values of a batch of tiles, of the tokens that have chosen their experts.
  __device__ __forceinline__ void Finish1(int batch, int end) const {
    const Fp8Share& share = requests_.work.first;
    const int parts = min(FP8_WARPS, share.sources), first = share.begin + batch * share.height;
    const int units = requests_.work.units, count = min((end - batch) * share.height, share.end - first);
    for (int i = int(threadIdx.x); i < count * FEW_TOKENS; i += THREADS) {
      const int unit = i / FEW_TOKENS, token = i % FEW_TOKENS, at = first + unit;
      const int active = at / units, in_expert = at - active * units, pair = choices_.of[active][token].pair;
      if (pair < 0) continue;
      const float* const sums = memory_.sums + unit / share.height * FEW_TILE_SUMS;
      const float low = Sum(sums, parts, PlaceOf(unit % share.height, token));
      const float high = Sum(sums, parts, PlaceOf(unit % share.height + 8, token));
      if (requests_.work.is_gated) {
        Write(active, pair, in_expert, Biased(active, p_.intermediate + in_expert, low),
              Biased(active, in_expert, high));
      } else {
        Write(active, pair, in_expert, Biased(active, in_expert, low), 0.f);
        Write(active, pair, in_expert + units, Biased(active, in_expert + units, high), 0.f);
      }
    }
  }
  /// Add the warps' accumulators, in the order of their sources.
  __device__ __forceinline__ static float Sum(const float* sums, int parts, int place) {
    float x = 0.f;
#pragma unroll 8
    for (int warp = 0; warp < parts; ++warp) x += sums[warp * TILE_ROWS * FEW_TOKENS + place];
    return x;
  }
  /// Return a sum of GEMM 1, rounded to bf16 or times the factor of its expert, plus its bias.
  __device__ __forceinline__ float Biased(int active, int row, float x) const {
    x = IS_BLOCK ? __bfloat162float(__float2bfloat16_rn(x)) : x * FactorOf(p_.factors[0], active);
    if (p_.bias1 == nullptr) return x;
    const int64_t rows = (requests_.work.is_gated ? 2 : 1) * p_.intermediate;
    return x + Load16(p_.bias1, choices_.active[active] * rows + row, p_.output_element);
  }
  __device__ __forceinline__ float FactorOf(const float* factors, int active) const {
    return factors == nullptr ? 1.f : factors[choices_.active[active]];
  }
  __device__ __forceinline__ void Write(int active, int pair, int row, float gate, float up) const {
    const float h = ActivateValue(p_.activation.type, memory_.constants[active], gate, up);
    const int64_t to = int64_t(pair) * p_.intermediate + row;
    if (IS_BLOCK) {
      Store16(p_.hidden_values, to, p_.element, h);
    } else {
      const float q = p_.quantizers[p_.has_quantizer_of_expert ? choices_.active[active] : 0];
      static_cast<uint8_t*>(p_.hidden_values)[to] = uint8_t(Fp8Pair(h * q, 0.f, __NV_E4M3));
    }
  }

  /// Write the outputs of a batch of tiles.
  __device__ __forceinline__ void Finish2(int batch, int end) const {
    const Fp8Share& share = requests_.work.second;
    const int first = share.begin + batch * TILE_ROWS, count = min((end - batch) * TILE_ROWS, share.end - first);
    for (int i = int(threadIdx.x); i < count * p_.tokens; i += THREADS) {
      const int token = i / count, row = i - token * count, at = first + row;
      const float* const sums = memory_.sums + row / TILE_ROWS * FewSlots(p_) * FEW_SLOT_SUMS + row % TILE_ROWS;
      Store16(p_.output, token * p_.output_stride + at, p_.output_element, Output(token, at, sums));
    }
  }
  /// Return an output: the sum over the token's experts, in their order.
  __device__ __forceinline__ float Output(int token, int row, const float* sums) const {
    const int rounds = Rounds();
    float total = 0.f;
    for (int i = 0; i < memory_.lists.count[token]; ++i) {
      const int active = memory_.lists.active[token][i];
      const Choice& choice = choices_.of[active][token];
      float x = 0.f;
#pragma unroll 4
      for (int round = 0; round < rounds; ++round) x += sums[SlotOf(choice.pair, round)];
      if (!IS_BLOCK) x *= FactorOf(p_.factors[1], active);
      if (p_.bias2 != nullptr) {
        x += Load16(p_.bias2, int64_t(choices_.active[active]) * p_.hidden + row, p_.output_element);
      }
      total += choice.factor * x;
    }
    return total;
  }

  const MonoParams& p_;
  FewMemory& memory_;
  const Choices<FEW_TOKENS>& choices_;
  Fp8Requests<IS_BLOCK, FewBatches> requests_;
  const uint32_t ring_;
  uint32_t slot_ = 0;
};

template <bool IS_BLOCK>
__global__ void __launch_bounds__(FP8_WARPS * 32, 1) Fp8FewKernel(const __grid_constant__ MonoParams p) {
  using Block = Fp8FewBlock<IS_BLOCK>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& memory = *reinterpret_cast<FewMemory*>(shared_memory);
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const typename Block::Elements elements = Block::LoadTokens(p);  // ahead of all that waits
  FindChoices(p, memory.choices);
  Block(p, memory).Run(grid_barrier, elements);
}

}  // namespace mono

FLASHINFER_INLINE Status MonoFp8Few(const MonoParams& p, bool is_block, Stream stream) {
  using mono::FewMemory, mono::Fp8FewKernel, mono::FP8_WARPS, mono::Launch;
  const int64_t pairs = int64_t(p.tokens) * p.top_k;
  if (p.tokens > mono::FEW_TOKENS || pairs > MONO_MAX_PAIRS) return cudaErrorNotSupported;
  if (mono::FewSlots(p) * mono::FEW_SLOT_SUMS > mono::FEW_SUMS) return cudaErrorNotSupported;
  return is_block ? Launch<Fp8FewKernel<true>, FP8_WARPS * 32, sizeof(FewMemory)>(p, stream)
                  : Launch<Fp8FewKernel<false>, FP8_WARPS * 32, sizeof(FewMemory)>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
