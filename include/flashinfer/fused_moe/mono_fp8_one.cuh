// SPDX-License-Identifier: Apache-2.0
// The kernel of mono_one.cuh for e4m3 weights with scales of 128 x 128 blocks. A stage has the columns of a block. Each block
// of the grid quantises the token once, by 1 x 128, and keeps its codes as fp16. Numbers of e4m3 are multiplied as fp16, which
// holds them: sums are fp32, where Hopper's own products of e4m3 keep fewer bits.
#pragma once
#include "../ptx/math.cuh"
#include "mono_one.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

struct Fp8BlockOne {
  using Element = __nv_bfloat16;
  static constexpr int COLUMNS = ROW_BYTES, BYTES = STAGE_BYTES + TILE_ROWS * 4;  // rows, then a scale of each
  static constexpr int WARPS = FLASHINFER_MONO_ONE_WARPS, STAGES = FLASHINFER_MONO_ONE_STAGES;
  static constexpr int CODE_BYTES = COLUMNS * 2, OPERAND_BYTES = CODE_BYTES + 16;  // fp16 codes, then their scale

  __device__ __forceinline__ static void Request(uint32_t stage, const Matrix& m, int expert, int row, int used,
                                                 int chunk, bool is_paired) {
    RequestRows<1>(stage, m, expert, row, used, chunk, is_paired);
    const int in_tile = int(threadIdx.x) % 32, at = m.first + row + in_tile + (in_tile >= 8 ? m.second : 0);
    if (in_tile >= TILE_ROWS || (is_paired ? in_tile % 8 : in_tile) >= used) return;
    const int64_t block = int64_t(expert) * ((m.rows + 127) / 128) + at / 128;
    const auto* const from = static_cast<const float*>(m.scales) + block * ((m.columns + 127) / 128) + chunk;
    ptx::CopyAsync4(stage + STAGE_BYTES + in_tile * 4, from);
  }

  /// Quantise 128 columns; a warp calls it.
  template <int PRODUCT>
  __device__ __forceinline__ static void Prepare(uint32_t to, const Element* x, int chunk, int columns) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    const int lane = int(threadIdx.x) % 32, column = chunk * COLUMNS + lane * 4;
    uint2 words{};
    if (column < columns) words = LoadElements<PRODUCT, uint2>(x + column);
    const float values[4] = {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                             __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u)};
    float amax = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
#pragma unroll
    for (int i = 1; i < 32; i *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
    const float q = amax == 0.f ? 1.f : 448.f / amax;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t codes = uint16_t(Fp8Pair(values[2 * i] * q, values[2 * i + 1] * q, __NV_E4M3));
      ptx::StoreShared4(to + lane * 8 + i * 4, ptx::HalvesOfE4M3(codes));
    }
    if (lane == 0) ptx::StoreShared4(to + CODE_BYTES, __float_as_uint(1.f / q));
#endif
  }

  /// Return sums of rows lane / 4 and lane / 4 + 8, which lane % 4 == 0 has; others have zeros.
  __device__ __forceinline__ static float2 MultiplyOne(uint32_t stage, uint32_t operand, uint32_t zeros) {
    float2 result{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    const int lane = int(threadIdx.x) % 32;
    float sums[4] = {};
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t low[4], high[4];
      ptx::LoadFragment(low, InStage(stage, lane / 4, 4 * g + lane % 4));
      ptx::LoadFragment(high, InStage(stage, lane / 4 + 8, 4 * g + lane % 4));
      uint32_t x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::LoadFragment(x[i], lane < 4 ? operand + g * 128 + lane * 32 + i * 16 : zeros);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a[4] = {ptx::HalvesOfE4M3(uint16_t(low[i])), ptx::HalvesOfE4M3(uint16_t(high[i])),
                               ptx::HalvesOfE4M3(uint16_t(low[i] >> 16)), ptx::HalvesOfE4M3(uint16_t(high[i] >> 16))};
        ptx::Mma<__half>(sums, a, x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
      }
    }
    const float scale = __uint_as_float(ptx::LoadShared4(operand + CODE_BYTES));
    const uint32_t of_rows = stage + STAGE_BYTES + lane / 4 * 4;
    const float low = __uint_as_float(ptx::LoadShared4(of_rows)),
                high = __uint_as_float(ptx::LoadShared4(of_rows + 32));
    if (lane % 4 == 0) result = {sums[0] * (low * scale), sums[2] * (high * scale)};
#endif
    return result;
  }
};

}  // namespace mono

FLASHINFER_INLINE Status MonoFp8Block(const MonoParams& p, Stream stream) {
  using mono::Fp8BlockOne, mono::LaunchOne;
  if (!mono::HasRoomForOne<Fp8BlockOne>(p)) return cudaErrorNotSupported;
  return (p.routing.logits != nullptr ? LaunchOne<Fp8BlockOne, true> : LaunchOne<Fp8BlockOne, false>)(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
