// SPDX-License-Identifier: Apache-2.0
// The kernel of mono.cuh for MXFP4 weights in the order of gemm/w4_layout.h, which is that of A's fragments: blocks of 16 rows
// by 64 columns stay whole. A stage has four blocks along the columns, and their scales.
#pragma once
#include "../gemm/w4_decode.cuh"
#include "mono.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

struct Mxfp4Weights {
  using Element = __nv_bfloat16;
  static constexpr int COLUMNS = 256, BYTES = STAGE_BYTES + 2 * TILE_ROWS * 4;  // codes; scales (2, 16 rows, 4)
  static constexpr int WARPS = FLASHINFER_MONO_QUANTIZED_WARPS, STAGES = FLASHINFER_MONO_QUANTIZED_STAGES;
  static constexpr int ROW_UNIT = TILE_ROWS, SETS = 2, VECTORS = 8;
  static constexpr bool ROUNDS_SUMS = false;

  /// Return the place of a hidden value: what a lane needs of 64 columns lies together.
  __device__ __forceinline__ static int HiddenColumn(int i) {
    return i / 64 * 64 + i % 8 / 2 * 16 + i % 64 / 16 * 4 + i % 16 / 8 * 2 + i % 2;
  }

  __device__ __forceinline__ static void Request(uint32_t stage, const Matrix& m, int expert, int row, int, int chunk,
                                                 bool) {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t rows = m.rows, columns = m.columns, at = m.first + row;  // numbers of blocks fit 32 bits
    const uint32_t block = (expert * (rows / 16) + at / 16) * (columns / 64) + chunk * 4;
    const auto* const codes =
        static_cast<const unsigned char*>(m.data) + lane * 16 + uint64_t(block) * gemm::W4_BLOCK_BYTES;
    const bool is_half = chunk * COLUMNS + 128u >= columns;  // columns are a multiple of 128
#pragma unroll
    for (int i = 0; i < STAGE_BYTES / gemm::W4_BLOCK_BYTES; ++i) {
      if (i == 2 && is_half) break;
      ptx::CopyAsync16(stage + i * gemm::W4_BLOCK_BYTES + lane * 16, codes + i * gemm::W4_BLOCK_BYTES, true);
    }
    if (is_half && lane >= TILE_ROWS) return;
    const uint32_t of_scales = (expert * (rows / 64) + at / 64) * (columns / 128) + chunk * 2 + lane / TILE_ROWS;
    ptx::CopyAsync4(stage + STAGE_BYTES + lane * 4, static_cast<const unsigned char*>(m.scales) + lane % 16 * 16 +
                                                        uint64_t(of_scales) * 256 + at / 16 % 4 * 4);
  }

  template <int PRODUCT>
  __device__ __forceinline__ static void LoadToken(const Element* x, int chunk, int columns, uint4 (&to)[VECTORS]) {
    const int lane = int(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int block = chunk * COLUMNS + i / 2 * 64;
      to[i] = uint4{};
      if (x == nullptr || block >= columns) continue;
      if (PRODUCT == 2) {
        to[i] = LoadElements<2, uint4>(x + block + lane * 16 + i % 2 * 8);
      } else {
        const Element* const from = x + block + i % 2 * 32 + lane * 2;
        to[i] = {LoadElements<1, uint32_t>(from), LoadElements<1, uint32_t>(from + 8),
                 LoadElements<1, uint32_t>(from + 16), LoadElements<1, uint32_t>(from + 24)};
      }
    }
  }

  template <int TILES>
  __device__ __forceinline__ static void Multiply(uint32_t stage, int chunk, int columns,
                                                  const uint4 (&tokens)[TILES][VECTORS], float (&sums)[TILES][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int lane = int(threadIdx.x) % 32;
    float more[TILES][4] = {};  // two chains of products: one would take longer than the weights
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (chunk * COLUMNS + i / 2 * 128 >= columns) break;
      const uint32_t scales = stage + STAGE_BYTES + i / 2 * 64 + lane / 4 * 4;
      gemm::FragmentDecoder<gemm::WeightCode::kE2M1> decoder(ptx::LoadShared4(scales), ptx::LoadShared4(scales + 32));
      decoder.FindLarge();
      uint32_t words[4], a[4][4];
      ptx::LoadFragment(words, stage + i * gemm::W4_BLOCK_BYTES + lane * 16);
      decoder.Decode({words[0], words[1], words[2], words[3]}, i % 2, a);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4& x = tokens[t][2 * i + j];
          ptx::Mma<Element>(sums[t], a[2 * j], x.x, x.y);
          ptx::Mma<Element>(more[t], a[2 * j + 1], x.z, x.w);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += more[t][i];
    }
#endif
  }
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
