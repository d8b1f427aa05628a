// SPDX-License-Identifier: Apache-2.0
// The kernel of mono.cuh for e4m3 weights with scales of 128 x 128 blocks. A stage has the columns of a block. Each lane
// quantises its part of the tokens, four lanes a token, by 1 x 128. Numbers of e4m3 are multiplied as fp16, which holds them:
// sums are fp32, where Hopper's own products of e4m3 keep fewer bits.
#pragma once
#include "../ptx/math.cuh"
#include "mono.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

struct Fp8BlockWeights {
  using Element = __nv_bfloat16;
  static constexpr int COLUMNS = ROW_BYTES, BYTES = STAGE_BYTES + TILE_ROWS * 4;  // rows, then a scale of each
  static constexpr int WARPS = FLASHINFER_MONO_QUANTIZED_WARPS, STAGES = FLASHINFER_MONO_QUANTIZED_STAGES;
  static constexpr int ROW_UNIT = 1, SETS = 1, VECTORS = 4;
  static constexpr bool ROUNDS_SUMS = true;

  __device__ __forceinline__ static int HiddenColumn(int i) { return i; }

  __device__ __forceinline__ static void Request(uint32_t stage, const Matrix& m, int expert, int row, int used,
                                                 int chunk, bool is_paired) {
    RequestRows<1>(stage, m, expert, row, used, chunk, is_paired);
    const int in_tile = int(threadIdx.x) % 32, at = m.first + row + in_tile + (in_tile >= 8 ? m.second : 0);
    if (in_tile >= TILE_ROWS || (is_paired ? in_tile % 8 : in_tile) >= used) return;
    const int64_t block = int64_t(expert) * ((m.rows + 127) / 128) + at / 128;
    const auto* const from = static_cast<const float*>(m.scales) + block * ((m.columns + 127) / 128) + chunk;
    ptx::CopyAsync4(stage + STAGE_BYTES + in_tile * 4, from);
  }

  template <int PRODUCT>
  __device__ __forceinline__ static void LoadToken(const Element* x, int chunk, int columns, uint4 (&to)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = chunk * COLUMNS + i / 2 * 64 + int(threadIdx.x) % 4 * 16 + i % 2 * 8;
      to[i] = uint4{};
      if (x != nullptr && column < columns) to[i] = LoadElements<PRODUCT, uint4>(x + column);
    }
  }

  template <int TILES>
  __device__ __forceinline__ static void Multiply(uint32_t stage, int, int, const uint4 (&tokens)[TILES][VECTORS],
                                                  float (&sums)[TILES][4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    const int lane = int(threadIdx.x) % 32;
    uint32_t codes[TILES][16];  // pairs of fp16
    float scales[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) scales[t] = Quantize(tokens[t], codes[t]);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t low[4], high[4];
      ptx::LoadFragment(low, InStage(stage, lane / 4, 4 * g + lane % 4));
      ptx::LoadFragment(high, InStage(stage, lane / 4 + 8, 4 * g + lane % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a[4] = {ptx::HalvesOfE4M3(uint16_t(low[i])), ptx::HalvesOfE4M3(uint16_t(high[i])),
                               ptx::HalvesOfE4M3(uint16_t(low[i] >> 16)), ptx::HalvesOfE4M3(uint16_t(high[i] >> 16))};
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          ptx::Mma<__half>(sums[t], a, codes[t][8 * g + 2 * i], codes[t][8 * g + 2 * i + 1]);
      }
    }
    float of_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of_rows[i] = __uint_as_float(ptx::LoadShared4(stage + STAGE_BYTES + (lane / 4 + 8 * i) * 4));
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[t][i] *= of_rows[i / 2] * __shfl_sync(~0u, scales[t], lane % 4 * 8 + i % 2 * 4);
      }
    }
#endif
  }

 private:
  /// Quantise 128 columns of a token, 32 in each of 4 lanes; return their scale.
  __device__ __forceinline__ static float Quantize(const uint4 (&x)[VECTORS], uint32_t (&codes)[16]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    float values[32], amax = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[i * 8 + j * 2] = __uint_as_float(words[j] << 16);
        values[i * 8 + j * 2 + 1] = __uint_as_float(words[j] & 0xffff0000u);
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(values[i]));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const float q = amax == 0.f ? 1.f : 448.f / amax;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      codes[i] = ptx::HalvesOfE4M3(uint16_t(Fp8Pair(values[2 * i] * q, values[2 * i + 1] * q, __NV_E4M3)));
    }
    return 1.f / q;
#else
    return 1.f;
#endif
  }
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
