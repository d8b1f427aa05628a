// SPDX-License-Identifier: Apache-2.0
// Four-bit weights to bf16 or e4m3 in registers, as fragments of the A operand of wgmma; order of the codes in w4_layout.h.
//
// e2m1: the sign at bit 15 and the magnitude at bits 8 to 6 of a bf16 are the code's value times 2^-126, so one
// multiplication by 2^(126 + exponent) gives the scaled value (bf16 multiplications keep subnormals). int4: the bits of
// 128 + (code + 8), minus 136, times the scale, which is the only rounding. Shifted e2m1: each scale has a table of eight e4m3
// bytes, in which four magnitudes are looked up at once.
#pragma once
#include "../ptx/math.cuh"
#include "w4_layout.h"

namespace flashinfer {
namespace gemm {

/// Bytes of the scales of 64 rows by 128 columns.
FLASHINFER_HD constexpr int ScaleBytes(WeightCode type) { return type == WeightCode::kInt4 ? 128 : 256; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr uint32_t E2M1_SIGNS = 0x80008000u, E2M1_MAGNITUDES = 0x01C001C0u, E2M1_ALL = 0x81C081C0u;

/// Spread a word of eight e2m1 codes to four pairs of 16-bit numbers, value times 2^-126.
__device__ __forceinline__ void SpreadE2M1(uint32_t word, uint32_t (&to)[4]) {
  to[0] = word & E2M1_ALL;
  to[1] = word << 3 & E2M1_ALL;
  to[2] = (word << 1 & E2M1_SIGNS) | (word >> 3 & E2M1_MAGNITUDES);
  to[3] = (word << 2 & E2M1_SIGNS) | (word << 6 & E2M1_MAGNITUDES);
}

/// Scales of two rows (lane / 4 and lane / 4 + 8 of a warp's 16) and 128 columns, and decoding with them.
template <WeightCode TYPE>
class FragmentDecoder;

template <>
class FragmentDecoder<WeightCode::kE2M1> {
 public:
  /// Read from the folded scales of the warpgroup's 64 rows in shared memory.
  __device__ __forceinline__ explicit FragmentDecoder(const unsigned char* scales) {
    const int warp = int(threadIdx.x) % 128 / 32, row = int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) bytes_[h] = *reinterpret_cast<const uint32_t*>(scales + (row + 8 * h) * 16 + warp * 4);
    FindLarge();
  }

  /// Use the scales of the two rows, four bytes each. A caller of DecodeGroup finds large scales with HasLarge itself.
  __device__ __forceinline__ FragmentDecoder(uint32_t first, uint32_t second) : bytes_{first, second} {}

  /// Find scales above 2, for Decode. Called by all lanes.
  __device__ __forceinline__ void FindLarge() { is_large_ = __any_sync(~0u, HasLarge(bytes_[0] | bytes_[1])); }

  /// Return true if one of four scales is above 2, so that DecodeHalf<true> is needed.
  __device__ __forceinline__ static bool HasLarge(uint32_t bytes) { return (bytes & 0x80808080u) != 0; }

  /// Decode the words of 64 columns; half: 0 or 1 of the 128 columns. `from`: where the words are in shared memory, which
  /// large scales read again so that words need no registers until then.
  __device__ __forceinline__ void Decode(const uint4& words, const unsigned char* from, int half,
                                         uint32_t (&to)[4][4]) const {
    DecodeHalf<false>(words, half, to);
    if (is_large_) DecodeHalf<true>(*reinterpret_cast<const uint4*>(from), half, to);
  }

  /// Decode the two words of group 0 to 3 of 32 columns. MAY_BE_LARGE: false if HasLarge() is false.
  template <bool MAY_BE_LARGE>
  __device__ __forceinline__ void DecodeGroup(uint32_t x, uint32_t y, int group, uint32_t (&to)[2][4]) const {
    Multiply<MAY_BE_LARGE>(x, y, group, to);
    if constexpr (MAY_BE_LARGE) {
      MultiplyLarge(group, to[0]);
      MultiplyLarge(group, to[1]);
    }
  }

 private:
  template <bool MAY_BE_LARGE>
  __device__ __forceinline__ void DecodeHalf(const uint4& words, int half, uint32_t (&to)[4][4]) const {
    uint32_t pair[2][4];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      DecodeGroup<MAY_BE_LARGE>(g == 0 ? words.x : words.z, g == 0 ? words.y : words.w, 2 * half + g, pair);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[2 * g + i / 4][i % 4] = pair[i / 4][i % 4];
    }
  }

  template <bool MAY_BE_LARGE>
  __device__ __forceinline__ void Multiply(uint32_t x, uint32_t y, int group, uint32_t (&to)[2][4]) const {
    uint32_t factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] = Factor<MAY_BE_LARGE>(Byte(h, group));
    SpreadE2M1(x, to[0]), SpreadE2M1(y, to[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i / 4][i % 4] = ptx::MultiplyBf16Pairs(to[i / 4][i % 4], factor[i % 2]);
  }

  __device__ __forceinline__ uint32_t Byte(int h, int group) const { return __byte_perm(bytes_[h], 0, 0x4440 + group); }
  /// Return a pair of 2^(byte - 1): exponent 126 + s - 127.
  template <bool MAY_BE_LARGE>
  __device__ __forceinline__ static uint32_t Factor(uint32_t byte) {
    return (MAY_BE_LARGE ? min(byte, 128u) : byte) * 0x00800080u + 0x3F003F00u;
  }
  /// Multiply by what Factor() left out of scales above 2; 255 is NaN. No trained layer has them.
  __device__ __forceinline__ void MultiplyLarge(int group, uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = Byte(i % 2, group);
      const uint32_t rest = byte == 255 ? 0x7FFF7FFFu : (max(byte, 128u) - 1) * 0x00800080u;
      to[i] = ptx::MultiplyBf16Pairs(to[i], rest);
    }
  }

  uint32_t bytes_[2];
  bool is_large_ = false;
};

template <>
class FragmentDecoder<WeightCode::kInt4> {
 public:
  __device__ __forceinline__ explicit FragmentDecoder(const unsigned char* scales) {
    const int warp = int(threadIdx.x) % 128 / 32, row = int(threadIdx.x) % 32 / 4;
    *this = FragmentDecoder(*reinterpret_cast<const uint32_t*>(scales + row * 16 + warp * 4), 0);
  }

  /// Use the scales of two rows, two bytes each.
  __device__ __forceinline__ FragmentDecoder(uint32_t both, uint32_t) : both_(both) {}

  __device__ __forceinline__ static bool HasLarge(uint32_t) { return false; }

  __device__ __forceinline__ void Decode(const uint4& words, const unsigned char*, int, uint32_t (&to)[4][4]) const {
    const uint32_t x[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) DecodeWord(x[j], to[j]);
  }

  template <bool>
  __device__ __forceinline__ void DecodeGroup(uint32_t x, uint32_t y, int, uint32_t (&to)[2][4]) const {
    DecodeWord(x, to[0]), DecodeWord(y, to[1]);
  }

 private:
  __device__ __forceinline__ void DecodeWord(uint32_t x, uint32_t (&to)[4]) const {
    const uint32_t factor[2] = {__byte_perm(both_, 0, 0x1010), __byte_perm(both_, 0, 0x3232)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t biased = ptx::AndXor(x >> (4 * i), 0x000F000Fu, 0x43084308u);
      to[i] = ptx::MultiplyBf16Pairs(ptx::SubtractBf16Pairs(biased, 0x43084308u), factor[i % 2]);
    }
  }

  uint32_t both_;
};

/// Decodes to e4m3, exactly.
template <>
class FragmentDecoder<WeightCode::kShiftedE2M1> {
 public:
  __device__ __forceinline__ explicit FragmentDecoder(const unsigned char* scales) {
    const int warp = int(threadIdx.x) % 128 / 32, row = int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) bytes_[h] = *reinterpret_cast<const uint32_t*>(scales + (row + 8 * h) * 16 + warp * 4);
  }

  /// Decode the words of 64 columns, half 0 or 1 of the 128: a fragment of e4m3 for each 32.
  __device__ __forceinline__ void Decode(const uint4& words, const unsigned char*, int half,
                                         uint32_t (&to)[2][4]) const {
    DecodeWord(words.x, 0, 2 * half, to[0][0], to[0][2]), DecodeWord(words.y, 1, 2 * half, to[0][1], to[0][3]);
    DecodeWord(words.z, 0, 2 * half + 1, to[1][0], to[1][2]), DecodeWord(words.w, 1, 2 * half + 1, to[1][1], to[1][3]);
  }

 private:
  /// Decode the codes of row h: four columns each. The table has 0, 0.5, 1, 1.5 and 2, 3, 4, 6, times 2^(byte - 6).
  __device__ __forceinline__ void DecodeWord(uint32_t word, int h, int group, uint32_t& first, uint32_t& second) const {
    const uint32_t byte = __byte_perm(bytes_[h], 0, 0x4440 + group), places = word & 0x77777777u;
    const uint32_t small = byte * 0x08080800u + 0x0C080000u, large = byte * 0x08080808u + 0x1C181410u;
    first = __byte_perm(small, large, places) | (word << 4 & 0x80808080u);
    second = __byte_perm(small, large, places >> 16) | (word & 0x80808080u);
  }

  uint32_t bytes_[2];
};

#endif

}  // namespace gemm
}  // namespace flashinfer
