// SPDX-License-Identifier: Apache-2.0
// Gated activations between a product and its store: fp32 accumulators of gate and up columns become one rounded result. Rows
// of weights are [up ; gate]; a tile of weights is loaded as two boxes, as many rows of each half. With tokens on the M
// side a thread then has both values in its accumulators. With weights on the M side one warpgroup has the up columns
// and the other the gate columns, and they swap halves of their sums through shared memory; with block scales each
// warpgroup has 64 up columns and their gate columns, and the warps tell each other the largest results of their
// tokens.
#pragma once
#include <cuda_fp8.h>

#include "../../ptx/barrier.cuh"
#include "../../moe/swiglu.h"
#include "epilogue.cuh"

namespace flashinfer {
namespace gemm {

constexpr int SWAP_BYTES = 2 * CONSUMERS * WARPGROUP * 8;  // two turns of 8 bytes per consumer thread

/// Bytes of BlockMaxima: two turns of one number per consumer warp and token.
constexpr int MaximaBytes(int tokens) { return 2 * CONSUMERS * (WARPGROUP / 32) * tokens * 4; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Constants of one group of tokens.
struct GateConstants {
  float alpha, beta, limit;
  float factor;     // multiplies accumulators
  float quantizer;  // results are multiplied by it
  int64_t bias;     // position of the group's biases

  __device__ __forceinline__ GateConstants(const GemmParams& p, int group, float scale) {
    const GatedActivation& a = p.activation;
    const auto constant = [&](const float* values, float standard) {
      return values == nullptr ? standard : values[group];
    };
    alpha = constant(a.alpha, 1.f), beta = constant(a.beta, 0.f);
    limit = constant(a.limit, __int_as_float(0x7F800000));
    factor = scale * constant(a.factor, 1.f);
    quantizer = a.quantizer == nullptr ? 1.f : a.quantizer[a.is_quantizer_of_group ? group : 0];
    bias = int64_t(group) * 2 * p.n;
  }

  /// Return true if the activation is that of two arguments, of accumulators times `factor`: a quarter of the instructions.
  __device__ __forceinline__ static bool IsPlain(const GemmParams& p) {
    const GatedActivation& a = p.activation;
    return a.alpha == nullptr && a.beta == nullptr && a.limit == nullptr && a.bias == nullptr && a.quantizer == nullptr;
  }
};

/// Return the biases of up and gate of column `c`.
__device__ __forceinline__ float2 GateBias(const GemmParams& p, const GateConstants& constants, int c) {
  const void* const bias = p.activation.bias;
  if (bias == nullptr || c >= p.n) return {0.f, 0.f};
  const int64_t up = constants.bias + c, gate = up + p.n;
  if (p.activation.is_bias_half) {
    const auto* x = static_cast<const __half*>(bias);
    return {__half2float(x[up]), __half2float(x[gate])};
  }
  const auto* x = static_cast<const __nv_bfloat16*>(bias);
  return {__bfloat162float(x[up]), __bfloat162float(x[gate])};
}

/// Return SwiGLU of a sum of up and one of gate, times the quantizer.
__device__ __forceinline__ float Gate(const GateConstants& c, float up, float gate, const float2& bias) {
  const float u = fmaf(up, c.factor, bias.x), g = fmaf(gate, c.factor, bias.y);
  return fused_moe::Swiglu(g, u, c.alpha, c.beta, c.limit) * c.quantizer;
}

/// Return both numbers rounded to bf16. Two at a time: a conversion of one number takes the slow unit of the special
/// functions.
__device__ __forceinline__ float2 RoundPair(float x, float y) {
  const uint32_t pair = PackPair(x, y, false);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t PackCodes(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}

/// Store the 16 rows of a warp, by 64 columns of e4m3, from registers to (row, column); `d` as in StoreSlab, `staging`:
/// the warp's 2 KB, of which rows take 64 bytes and a gap that spreads them over the banks.
__device__ __forceinline__ void StoreCodes(const GemmParams& p, const float* d, uint32_t staging, const Tile& tile,
                                           int row, int column) {
  constexpr int ROW_BYTES = 80;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const bool is_odd = quad % 2 != 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t low = PackCodes(d[4 * j], d[4 * j + 1]), high = PackCodes(d[4 * j + 2], d[4 * j + 3]);
    // Even lanes collect four columns of row lane / 4, odd lanes those of the row 8 below.
    const uint32_t other = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
    const uint32_t word = is_odd ? other | high << 16 : low | other << 16;
    ptx::StoreShared4(staging + (lane / 4 + (is_odd ? 8 : 0)) * ROW_BYTES + 8 * j + quad / 2 * 4, word);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 8 * i + lane / 4, c = column + 16 * quad;
    const float4 x = ptx::LoadShared16(staging + r * ROW_BYTES + 16 * quad);
    if (row + r < tile.end_row && c < p.n) *reinterpret_cast<float4*>(RowOf<uint8_t>(p, tile, row + r) + c) = x;
  }
  __syncwarp();
}

/// Store 64 rows of tokens by COLUMNS / 2 results from (row, column): accumulators with tokens on the M side, whose
/// first half of columns are up columns.
template <int COLUMNS>
__device__ __forceinline__ void StoreGatedRows(const GemmParams& p, float (&d)[COLUMNS / 2], float scale,
                                               uint32_t staging, int column, const Tile& tile, int row) {
  constexpr int COUNT = COLUMNS / 4;
  const int quad = threadIdx.x % 4, warp_row = row + int(threadIdx.x) % WARPGROUP / 32 * 16;
  const GateConstants constants(p, tile.weight_batch, scale);
  if (GateConstants::IsPlain(p) && AreWholeColumns<2 * COUNT>(p, column)) {
    if (constants.factor != 1.f) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) d[i] *= constants.factor;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) d[i] = fused_moe::Swiglu(d[COUNT + i], d[i]);
    StoreWholeColumns<2 * COUNT>(p, reinterpret_cast<float (&)[COUNT]>(d[0]), staging, column, tile, row);
    return;
  }
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 bias = GateBias(p, constants, column + 2 * i + 2 * quad + c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& up = d[i + 2 * h + c];
        up = Gate(constants, up, d[COUNT + i + 2 * h + c], bias);
      }
    }
  }
#pragma unroll
  for (int slab = 0; slab < COUNT / 32; ++slab) {
    if (p.out == Element::kE4M3) {
      StoreCodes(p, d + 32 * slab, staging, tile, warp_row, column + 64 * slab);
    } else {
      StoreRounded(p, d + 32 * slab, staging, tile, warp_row, column + 64 * slab);
    }
  }
}

/// Quantise and store 64 rows of tokens by 128 results from (row, column): accumulators of block-scaled products with
/// tokens on the M side, up columns in acc[0] and gate columns in acc[1], rounded to bf16 before the activation.
/// `staging`: the warp's 2 KB.
__device__ __forceinline__ void StoreGatedBlocks(const GemmParams& p, float (&acc)[2][SCALE_BLOCK / 2],
                                                 uint32_t staging, int column, const Tile& tile, int row) {
  constexpr int COUNT = SCALE_BLOCK / 2;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int warp_row = row + int(threadIdx.x) % WARPGROUP / 32 * 16;
  const GateConstants constants(p, tile.weight_batch, 1.f);
  float amax[2] = {};
  const auto activate = [&](const auto& result_of) {  // result_of(column, up, gate)
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const int c = column + i / 4 * 8 + 2 * quad, h = i % 4 / 2;
      float &x = acc[0][i], &y = acc[0][i + 1];
      const float2 up = RoundPair(x, y), gate = RoundPair(acc[1][i], acc[1][i + 1]);
      const float2 result = RoundPair(result_of(c, up.x, gate.x), result_of(c + 1, up.y, gate.y));
      x = result.x, y = result.y;
      amax[h] = fmaxf(amax[h], fmaxf(fabsf(x), fabsf(y)));
    }
  };
  if (GateConstants::IsPlain(p) && constants.factor == 1.f) {
    activate([](int, float up, float gate) { return fused_moe::Swiglu(gate, up); });
  } else {
    activate([&](int c, float up, float gate) { return Gate(constants, up, gate, GateBias(p, constants, c)); });
  }
  float q[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    amax[h] = fmaxf(amax[h], __shfl_xor_sync(~0u, amax[h], 1));
    amax[h] = fmaxf(amax[h], __shfl_xor_sync(~0u, amax[h], 2));
    q[h] = amax[h] == 0.f ? 1.f : 448.f / amax[h];
    const int r = warp_row + lane / 4 + 8 * h;
    if (quad == 0 && r < tile.end_row) {
      p.activation.scales[column / SCALE_BLOCK * p.activation.scale_stride + r] = 1.f / q[h];
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) acc[0][i] *= q[i % 4 / 2];
#pragma unroll
  for (int slab = 0; slab < 2; ++slab) StoreCodes(p, acc[0] + 32 * slab, staging, tile, warp_row, column + 64 * slab);
}

/// Swaps of accumulators between two consumer warpgroups. `slots`: SWAP_BYTES of shared memory for each `pair` of warpgroups.
class HalvesSwap {
 public:
  __device__ __forceinline__ explicit HalvesSwap(unsigned char* slots, int pair = 0)
      : slots_(reinterpret_cast<float2*>(slots + pair * SWAP_BYTES)), pair_(pair) {}

  /// Give the other warpgroup its two accumulators, and return the two that it gives: group 0 (up columns) keeps those of its
  /// first row and group 1 (gate columns) those of its second row. Two turns use different slots, so one barrier per
  /// turn is enough.
  __device__ __forceinline__ float2 Swap(const float (&x)[4], int group) {
    float2* const slots = slots_ + turn_ * CONSUMERS * WARPGROUP + threadIdx.x % WARPGROUP;
    turn_ ^= 1;
    slots[group * WARPGROUP] = group == 0 ? float2{x[2], x[3]} : float2{x[0], x[1]};
    if (pair_ == 0) {
      ptx::BarrierSync(int(NamedBarrier::kConsumers), CONSUMERS * WARPGROUP);
    } else {
      ptx::BarrierSync(int(NamedBarrier::kSecondPair), CONSUMERS * WARPGROUP);
    }
    return slots[(1 - group) * WARPGROUP];
  }

 private:
  float2* const slots_;
  const int pair_;
  int turn_ = 0;
};

/// Store 8 tokens from `row` by 64 results from `column`: one fragment of accumulators with weights on the M side, up columns
/// in warpgroup 0 and gate columns in warpgroup 1. Each stores 8 of every 16 columns.
__device__ __forceinline__ void StoreGatedTokens(const GemmParams& p, const float (&d)[4], HalvesSwap& swap,
                                                 const GateConstants& constants, int group, int column,
                                                 const Tile& tile, int row) {
  const float2 other = swap.Swap(d, group);
  const int lane = threadIdx.x % 32;
  const int first = column + int(threadIdx.x) % WARPGROUP / 32 * 16 + 8 * group;
  const float2 bias = GateBias(p, constants, first + lane / 4);
  const bool has_up = group == 0;
  const float x = Gate(constants, has_up ? d[0] : other.x, has_up ? other.x : d[2], bias);
  const float y = Gate(constants, has_up ? d[1] : other.y, has_up ? other.y : d[3], bias);
  const int token = row + lane / 4, c = first + 2 * (lane % 4);
  const bool is_stored = token < tile.end_row && c < p.n;
  if (p.out == Element::kE4M3) {
    const uint32_t codes = PackCodes(x, y);
    const uint32_t word = ptx::TransposeMatrix((codes & 0xFF) | (codes & 0xFF00) << 8);
    if (is_stored) *reinterpret_cast<uint16_t*>(RowOf<uint8_t>(p, tile, token) + c) = uint16_t(word | word >> 8);
  } else {
    const uint32_t word = ptx::TransposeMatrix(PackPair(x, y, p.out == Element::kFloat16));
    if (is_stored) *reinterpret_cast<uint32_t*>(RowOf<uint16_t>(p, tile, token) + c) = word;
  }
}

/// Largest magnitudes of the results of a tile, which the consumer warps tell each other. `slots`: MaximaBytes() of shared
/// memory. Tiles take its halves in turn, so one barrier per tile is enough.
template <int TOKENS>
class BlockMaxima {
 public:
  __device__ __forceinline__ explicit BlockMaxima(unsigned char* slots) : slots_(reinterpret_cast<float2*>(slots)) {}

  /// Replace the maxima of the warp, which all lanes of a quad position have (amax[j]: tokens 8 j + 2 (lane % 4) and the
  /// next), by those of all consumer warps. Called by all consumer threads.
  __device__ __forceinline__ void Share(float2 (&amax)[TOKENS / 8], int warp) {
    float2* const slots = slots_ + turn_ * WARPS * (TOKENS / 2);
    turn_ ^= 1;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      if (lane < 4) slots[warp * (TOKENS / 2) + 4 * j + lane] = amax[j];
    }
    ptx::BarrierSync(int(NamedBarrier::kConsumers), CONSUMERS * WARPGROUP);
#pragma unroll
    for (int i = 0; i < WARPS * (TOKENS / 8); ++i) {
      const int j = i / WARPS;
      const float2 other = slots[i % WARPS * (TOKENS / 2) + 4 * j + lane % 4];
      amax[j] = {fmaxf(amax[j].x, other.x), fmaxf(amax[j].y, other.y)};
    }
  }

 private:
  static constexpr int WARPS = CONSUMERS * WARPGROUP / 32;
  float2* const slots_;
  int turn_ = 0;
};

/// Quantise and store TOKENS tokens of a tile by 128 results from `column`: accumulators of block-scaled products with
/// weights on the M side, up columns in acc[0] and gate columns in acc[1], rounded to bf16 before the activation.
template <int TOKENS>
__device__ __forceinline__ void StoreGatedBlockTokens(const GemmParams& p, float (&acc)[2][TOKENS / 2],
                                                      BlockMaxima<TOKENS>& maxima, int column, const Tile& tile) {
  constexpr int FRAGMENTS = TOKENS / 8, WARPS = CONSUMERS * WARPGROUP / 32;
  const int lane = threadIdx.x % 32, quad = lane % 4, warp = int(threadIdx.x) / 32 - WARPGROUP / 32;
  const int first = column + 16 * warp;  // first column of the warp's 16 results
  const GateConstants constants(p, tile.weight_batch, 1.f);
  const float2 bias[2] = {GateBias(p, constants, first + lane / 4), GateBias(p, constants, first + lane / 4 + 8)};
  float2 amax[FRAGMENTS] = {};
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i += 2) {
    const float2 up = RoundPair(acc[0][i], acc[0][i + 1]), gate = RoundPair(acc[1][i], acc[1][i + 1]);
    const float2& b = bias[i % 4 / 2];
    const float2 result = RoundPair(Gate(constants, up.x, gate.x, b), Gate(constants, up.y, gate.y, b));
    acc[0][i] = result.x, acc[0][i + 1] = result.y;
    float2& most = amax[i / 4];
    most = {fmaxf(most.x, fabsf(result.x)), fmaxf(most.y, fabsf(result.y))};
  }
#pragma unroll
  for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      amax[j].x = fmaxf(amax[j].x, __shfl_xor_sync(~0u, amax[j].x, offset));
      amax[j].y = fmaxf(amax[j].y, __shfl_xor_sync(~0u, amax[j].y, offset));
    }
  }
  maxima.Share(amax, warp);
#pragma unroll
  for (int j = 0; j < FRAGMENTS; ++j) {
    if (tile.row + 8 * j >= tile.end_row) break;
    const float q[2] = {amax[j].x == 0.f ? 1.f : 448.f / amax[j].x, amax[j].y == 0.f ? 1.f : 448.f / amax[j].y};
    if (warp == j % WARPS && lane < 4) {
      float* const scales =
          p.activation.scales + column / SCALE_BLOCK * p.activation.scale_stride + tile.row + 8 * j + 2 * lane;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (tile.row + 8 * j + 2 * lane + c < tile.end_row) scales[c] = 1.f / q[c];
      }
    }
    // Elements of 16 bits are two results of a token, 8 columns apart. After the transposition a lane has those of token
    // lane / 4 from columns 2 quad and 2 quad + 1; even lanes collect four of the lower eight columns, odd lanes of the upper.
    const float* const d = acc[0] + 4 * j;
    const uint32_t word =
        ptx::TransposeMatrix(PackCodes(d[0] * q[0], d[2] * q[0]) | PackCodes(d[1] * q[1], d[3] * q[1]) << 16);
    const uint32_t lower = (word & 0xFF) | (word >> 8 & 0xFF00), upper = (word >> 8 & 0xFF) | (word >> 16 & 0xFF00);
    const uint32_t other = __shfl_xor_sync(~0u, quad % 2 ? lower : upper, 1);
    const uint32_t codes = quad % 2 ? other | upper << 16 : lower | other << 16;
    const int token = tile.row + 8 * j + lane / 4, c = first + quad % 2 * 8 + quad / 2 * 4;
    if (token < tile.end_row) *reinterpret_cast<uint32_t*>(RowOf<uint8_t>(p, tile, token) + c) = codes;
  }
}

#endif

}  // namespace gemm
}  // namespace flashinfer
