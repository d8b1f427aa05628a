// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights by one token (mono_one.cuh), without a multiplication of decoded weights by their scales. A stage has 8 groups
// of 32 columns, and the product of the tensor cores has 8 columns: the token's elements of group g are in column g, and
// zeros in the others. So a sum of the whole stage keeps the groups apart, and is multiplied by the scales at its end.
//
// Weights stay as they are spread, value times 2^-126, most of them subnormal, which the tensor cores keep. Operands are
// multiplied by 2^64, so that products are normal numbers in fp32: elements from 2^64 on would overflow.
#pragma once
#include "mono_mxfp4.cuh"
#include "mono_one.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

struct Mxfp4One : Mxfp4Weights {
  static constexpr int WARPS = FLASHINFER_MONO_ONE_WARPS, STAGES = FLASHINFER_MONO_ONE_STAGES;
  static constexpr int OPERAND_BYTES = COLUMNS * 2;

  /// Return the place of a hidden value: what a lane needs of 32 columns lies together.
  __device__ __forceinline__ static int HiddenColumn(int i) {
    return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
  }

  /// Write the elements of a chunk in the order of hidden values; a warp calls it.
  template <int PRODUCT>
  __device__ __forceinline__ static void Prepare(uint32_t to, const Element* x, int chunk, int columns) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int lane = int(threadIdx.x) % 32, column = chunk * COLUMNS + lane * 8;
    uint4 values{};
    if (column < columns) values = LoadElements<PRODUCT, uint4>(x + column);
    constexpr uint32_t FACTOR = 0x5F805F80u;  // 2^64
    values = {ptx::MultiplyBf16Pairs(values.x, FACTOR), ptx::MultiplyBf16Pairs(values.y, FACTOR),
              ptx::MultiplyBf16Pairs(values.z, FACTOR), ptx::MultiplyBf16Pairs(values.w, FACTOR)};
    if (PRODUCT == 2) {
      ptx::StoreShared16(to + lane * 16, values);
    } else {
      const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::StoreShared4(to + lane / 4 * 64 + i * 16 + lane % 4 * 4, words[i]);
    }
#endif
  }

  /// Return sums of rows lane / 4 and lane / 4 + 8, to be added over the lanes of a row.
  __device__ __forceinline__ static float2 MultiplyOne(uint32_t stage, int chunk, int columns, uint32_t operand,
                                                       uint32_t zeros) {
    float2 result{};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int lane = int(threadIdx.x) % 32;
    const bool is_half = chunk * COLUMNS + 128 >= columns;
    const uint32_t of_rows = stage + STAGE_BYTES + lane % 4 / 2 * 64 + lane / 4 * 4;
    const uint32_t scales[2] = {ptx::LoadShared4(of_rows), ptx::LoadShared4(of_rows + 32)};
    float sums[2][4] = {};  // two chains of products
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i == 2 && is_half) break;
      uint32_t words[4];
      ptx::LoadFragment(words, stage + i * gemm::W4_BLOCK_BYTES + lane * 16);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        uint32_t x[4], a[2][4];
        ptx::LoadFragment(x, lane / 4 == 2 * i + g ? operand + lane * 16 : zeros);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          gemm::SpreadE2M1(words[2 * g + j], a[j]);
          ptx::Mma<Element>(sums[j], a[j], x[2 * j], x[2 * j + 1]);
        }
      }
    }
    float of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t bytes = lane % 2 == 0 ? scales[h] : scales[h] >> 16;
      of_row[h] = (sums[0][2 * h] + sums[1][2 * h]) * 0x1p62f * Factor(bytes << 23 & 0x7F800000u) +
                  (sums[0][2 * h + 1] + sums[1][2 * h + 1]) * 0x1p62f * Factor(bytes << 15 & 0x7F800000u);
    }
    if (!is_half || lane % 4 < 2) result = {of_row[0], of_row[1]};  // behind the columns are scales of another stage
#endif
    return result;
  }

 private:
  /// Return a scale whose byte is given as the exponent of fp32; 255 is NaN, and 0, 2^-127, is zero here.
  __device__ __forceinline__ static float Factor(uint32_t bits) {
    return __uint_as_float(bits == 0x7F800000u ? 0x7FFFFFFFu : bits);
  }
};

}  // namespace mono

FLASHINFER_INLINE Status MonoMxfp4(const MonoParams& p, Stream stream) {
  if (mono::HasRoomForOne<mono::Mxfp4One>(p)) return mono::LaunchOne<mono::Mxfp4One>(p, stream);
  return LaunchMono<mono::Mxfp4Weights>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
