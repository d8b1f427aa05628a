// SPDX-License-Identifier: Apache-2.0
// Products of shared-memory tiles for the general GEMM kernel: 16-bit elements, and 8-bit ones decoded to fp16, which
// is exact, on tensor cores (mma.sync); fp32 elements with fp32 multiply-adds. The tiles are those of load.cuh.
//
// Both classes have one interface: Sums, accumulators of a thread; Multiply adds the products of one step; Promote adds scaled
// sums to others; Put writes the sums to shared memory as PARTS matrices [BLOCK_M][SUMS_STRIDE] that are to be added.
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/mma.cuh"
#include "load.cuh"

namespace flashinfer {
namespace gemm {

/// Formats of 8-bit operands.
struct Fp8Formats {
  bool a_is_e5m2, b_is_e5m2;
};

/// Convert 4 fp8 numbers to fp16: `low` from bytes 0 and 1, `high` from bytes 2 and 3. NaN and infinity are kept.
__device__ __forceinline__ void DecodeFp8(uint32_t x, bool is_e5m2, uint32_t& low, uint32_t& high) {
  if (is_e5m2) {  // the upper byte of an fp16 number
    low = __byte_perm(x, 0, 0x1404);
    high = __byte_perm(x, 0, 0x3424);
    return;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  low = ptx::HalvesOfE4M3(uint16_t(x));
  high = ptx::HalvesOfE4M3(uint16_t(x >> 16));
#else
  // The bits move under the wider exponent; a multiplication by 2^8 corrects the bias, subnormal numbers included. NaN,
  // the largest code, becomes 480 and is replaced.
  uint32_t pair[2] = {__byte_perm(x, 0, 0x1404), __byte_perm(x, 0, 0x3424)};
#pragma unroll
  for (uint32_t& bits : pair) {
    bits = ((bits >> 1) & 0x3f803f80u) | (bits & 0x80008000u);
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
    bits = *reinterpret_cast<const uint32_t*>(&value);
    bits |= __vcmpeq2(bits & 0x7fff7fffu, 0x5f805f80u) & 0x7fff7fffu;
  }
  low = pair[0], high = pair[1];
#endif
}

/// Tensor core products. WARPS_K warps share the steps of 32 bytes of K of the same results.
template <typename T, int BLOCK_M_, int BLOCK_N_, int WARPS_M, int WARPS_N, int WARPS_K, bool B_COLUMNS>
class MmaTile {
 public:
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
  static constexpr int PARTS = WARPS_K, SUMS_STRIDE = BLOCK_N + 8;  // 8: rows of one warp are in different banks
  static constexpr bool IS_FP8 = sizeof(T) == 1;

  static constexpr int ROWS = BLOCK_M / WARPS_M, COLUMNS = BLOCK_N / WARPS_N;  // tile of one warp
  static constexpr int TILES_M = ROWS / 16, TILES_N = COLUMNS / 8;
  static_assert(ROWS % 16 == 0 && COLUMNS % 16 == 0 && 4 % WARPS_K == 0 && !(IS_FP8 && B_COLUMNS));

  struct Sums {
    float x[TILES_M][TILES_N][4];
  };

  static __device__ __forceinline__ void Multiply(Sums& sums, const unsigned char* a_tile, const unsigned char* b_tile,
                                                  Fp8Formats formats) {
    const uint32_t a_at = ptx::SharedAddress(a_tile), b_at = ptx::SharedAddress(b_tile);
#pragma unroll
    for (int i = 0; i < 4 / WARPS_K; ++i) {
      const int step = i * WARPS_K + WarpK();
      uint32_t a[TILES_M][4], b[TILES_N / 2][4];
      LoadA(a, a_at, step);
      LoadB(b, b_at, step);
      if constexpr (IS_FP8) {
        MultiplyHalf(sums, a, b, 0, formats);
        MultiplyHalf(sums, a, b, 1, formats);
      } else {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
          for (int n = 0; n < TILES_N; ++n) {
            ptx::Mma<T>(sums.x[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void Promote(Sums& sums, const Sums& part, const float* a_scale,
                                                 const float* b_scale) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
      const float low = a_scale[Row(m)], high = a_scale[Row(m) + 8];
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const float2 b = *reinterpret_cast<const float2*>(b_scale + Column(n));
        sums.x[m][n][0] += part.x[m][n][0] * (low * b.x);
        sums.x[m][n][1] += part.x[m][n][1] * (low * b.y);
        sums.x[m][n][2] += part.x[m][n][2] * (high * b.x);
        sums.x[m][n][3] += part.x[m][n][3] * (high * b.y);
      }
    }
  }

  static __device__ __forceinline__ void Put(const Sums& sums, float* to) {
    to += WarpK() * BLOCK_M * SUMS_STRIDE;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const float (&x)[4] = sums.x[m][n];
        float* at = to + Row(m) * SUMS_STRIDE + Column(n);
        *reinterpret_cast<float2*>(at) = make_float2(x[0], x[1]);
        *reinterpret_cast<float2*>(at + 8 * SUMS_STRIDE) = make_float2(x[2], x[3]);
      }
    }
  }

 private:
  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int WarpM() { return threadIdx.x / 32 % WARPS_M; }
  static __device__ __forceinline__ int WarpN() { return threadIdx.x / 32 / WARPS_M % WARPS_N; }
  static __device__ __forceinline__ int WarpK() { return WARPS_K == 1 ? 0 : threadIdx.x / 32 / (WARPS_M * WARPS_N); }
  static __device__ __forceinline__ int Row(int m) { return WarpM() * ROWS + m * 16 + Lane() / 4; }
  static __device__ __forceinline__ int Column(int n) { return WarpN() * COLUMNS + n * 8 + Lane() % 4 * 2; }

  static __device__ __forceinline__ void LoadA(uint32_t (&a)[TILES_M][4], uint32_t at, int step) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
      ptx::LdMatrix(a[m], at + RowChunk(WarpM() * ROWS + m * 16 + Lane() % 16, 2 * step + Lane() / 16));
    }
  }

  /// Load fragments of pairs of 8 columns: registers 0 and 1 belong to the first 8, 2 and 3 to the second.
  static __device__ __forceinline__ void LoadB(uint32_t (&b)[TILES_N / 2][4], uint32_t at, int step) {
#pragma unroll
    for (int n = 0; n < TILES_N / 2; ++n) {
      const int column = WarpN() * COLUMNS + n * 16, matrix = Lane() / 8, line = Lane() % 8;
      if constexpr (B_COLUMNS) {
        ptx::LdMatrixTrans(b[n], at + ColumnChunk<BLOCK_N>(16 * step + matrix % 2 * 8 + line, column / 8 + matrix / 2));
      } else {
        ptx::LdMatrix(b[n], at + RowChunk(column + matrix / 2 * 8 + line, 2 * step + matrix % 2));
      }
    }
  }

  /// Multiply 16 of the 32 elements of K in a step of 8-bit elements. A lane has bytes 4c .. 4c + 3 of a row where mma
  /// expects elements 2c, 2c + 1, 2c + 8 and 2c + 9: the order along K is the same in a and b, so any order will do.
  static __device__ __forceinline__ void MultiplyHalf(Sums& sums, const uint32_t (&a)[TILES_M][4],
                                                      const uint32_t (&b)[TILES_N / 2][4], int half,
                                                      Fp8Formats formats) {
    uint32_t low[TILES_N], high[TILES_N];
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) DecodeFp8(b[n / 2][n % 2 * 2 + half], formats.b_is_e5m2, low[n], high[n]);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
      uint32_t halves[4];
      DecodeFp8(a[m][2 * half], formats.a_is_e5m2, halves[0], halves[2]);
      DecodeFp8(a[m][2 * half + 1], formats.a_is_e5m2, halves[1], halves[3]);
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) ptx::Mma<__half>(sums.x[m][n], halves, low[n], high[n]);
    }
  }
};

/// fp32 products. A thread has 4 x 4 results, 16 rows and columns apart.
class FmaTile {
 public:
  static constexpr int BLOCK_M = 64, BLOCK_N = 64, THREADS = 256, PARTS = 1, SUMS_STRIDE = BLOCK_N + 8;

  struct Sums {
    float x[4][4];
  };

  static __device__ __forceinline__ void Multiply(Sums& sums, const unsigned char* a_tile, const unsigned char* b_tile,
                                                  Fp8Formats) {
#pragma unroll 2
    for (int chunk = 0; chunk < ROW_BYTES / 16; ++chunk) {
      float4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = *reinterpret_cast<const float4*>(a_tile + RowChunk(Row(i), chunk));
        b[i] = *reinterpret_cast<const float4*>(b_tile + RowChunk(Column(i), chunk));
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float& x = sums.x[m][n];
          x = fmaf(a[m].x, b[n].x, x);
          x = fmaf(a[m].y, b[n].y, x);
          x = fmaf(a[m].z, b[n].z, x);
          x = fmaf(a[m].w, b[n].w, x);
        }
      }
    }
  }

  static __device__ __forceinline__ void Promote(Sums& sums, const Sums& part, const float* a_scale,
                                                 const float* b_scale) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sums.x[m][n] += part.x[m][n] * (a_scale[Row(m)] * b_scale[Column(n)]);
    }
  }

  static __device__ __forceinline__ void Put(const Sums& sums, float* to) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) to[Row(m) * SUMS_STRIDE + Column(n)] = sums.x[m][n];
    }
  }

 private:
  static __device__ __forceinline__ int Row(int i) { return threadIdx.x / 16 + 16 * i; }
  static __device__ __forceinline__ int Column(int i) { return threadIdx.x % 16 + 16 * i; }
};

}  // namespace gemm
}  // namespace flashinfer
