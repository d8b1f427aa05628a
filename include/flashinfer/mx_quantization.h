// SPDX-License-Identifier: Apache-2.0
// Block-scaled formats (the elements of a block share a scale): parameters and entries, shared by both backends.
//   mxfp8_quantize          fp8 e4m3 with one power of two (ue8m0) for 32 elements of a row
//   block_scale_interleave  scales from rows to the order that block-scaled matrix units read
//   dequantize              fp8 or fp4 blocks to fp32, on the host
// Defined in mx_quantization.cuh (CUDA) and mx_quantization_cpu.h (CPU); dequantisation on the CPU only.
//   test  pytest tests/quantization      bench  python benchmarks/bench_quantization.py
#pragma once
#include "backend.h"

#ifdef __CUDACC__
#define FLASHINFER_HOST_DEVICE __host__ __device__
#else
#define FLASHINFER_HOST_DEVICE
#endif

namespace flashinfer {

/// Position of the scale of (row, column). The swizzled layouts divide the matrix into tiles of 128 x 4 or 8 x 4
/// scales, stored one after the other along a row of tiles; padding beyond the matrix is zero.
enum class ScaleLayout : int { k128x4, k8x4, kLinear };

/// Shape of a scale matrix and of its padding.
struct ScaleGrid {
  int64_t rows, cols;
  ScaleLayout layout;

  FLASHINFER_HOST_DEVICE static constexpr int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
  FLASHINFER_HOST_DEVICE int64_t PaddedRows() const {
    return layout == ScaleLayout::kLinear ? rows : RoundUp(rows, layout == ScaleLayout::k128x4 ? 128 : 8);
  }
  FLASHINFER_HOST_DEVICE int64_t PaddedCols() const { return layout == ScaleLayout::kLinear ? cols : RoundUp(cols, 4); }
  FLASHINFER_HOST_DEVICE int64_t Size() const { return PaddedRows() * PaddedCols(); }
  FLASHINFER_HOST_DEVICE int64_t Index(int64_t row, int64_t col) const {
    const int64_t tile_col = col / 4 * 4, in_col = col % 4;
    if (layout == ScaleLayout::k128x4) {  // inside a tile: 32 groups of 4 rows that lie 32 apart
      return row / 128 * 128 * PaddedCols() + tile_col * 128 + row % 32 * 16 + row % 128 / 32 * 4 + in_col;
    }
    if (layout == ScaleLayout::k8x4) return row / 8 * 8 * PaddedCols() + tile_col * 8 + row % 8 * 4 + in_col;
    return row * cols + col;
  }
};

constexpr int MX_BLOCK = 32;  ///< elements of a row that share a scale in the MX formats

/// MXFP8 quantisation. Per block: t = amax / 448; the scale is the smallest 2^(byte - 127) that is >= t;
/// out = e4m3(x / scale), saturated.
template <typename T>
struct Mxfp8QuantizeParams {
  const T* input;   ///< rows x cols, contiguous
  uint8_t* out;     ///< e4m3, rows x cols
  uint8_t* scales;  ///< grid.Size() bytes, the padding written as 0
  ScaleGrid grid;   ///< rows, cols / 32
  bool enable_pdl;
};

template <typename T>
Status Mxfp8Quantize(const Mxfp8QuantizeParams<T>& params, Stream stream);

/// Interleaving of scales. U is the unsigned integer type of the size of a scale.
template <typename U>
struct InterleaveParams {
  const U* input;  ///< batch x rows x cols, contiguous
  U* out;          ///< batch x grid.Size()
  int64_t batch_size;
  ScaleGrid grid;  ///< 128 x 4
};

template <typename U>
Status BlockScaleInterleave(const InterleaveParams<U>& params, Stream stream);

/// Return the scale byte of a block. `bits`: float bits of the block's largest magnitude / 448, which is rounded up to
/// a power of two. Byte 0 stands for 2^-127 and below: the subnormal floats with a mantissa up to 0x400000.
FLASHINFER_HOST_DEVICE inline uint32_t ScaleByte(uint32_t bits) {
  const uint32_t exponent = bits >> 23 & 0xFF, mantissa = bits & 0x7FFFFF;
  const bool up = mantissa != 0 && !(exponent == 0 && mantissa <= 0x400000);
  const uint32_t byte = exponent + (up ? 1 : 0);
  return byte < 254 ? byte : 254;
}

/// Return the bits of the float 2^(127 - byte), or of 0 for byte 0: all codes of such a block are zero.
FLASHINFER_HOST_DEVICE inline uint32_t InverseScaleBits(uint32_t byte) {
  return byte == 0 ? 0u : byte == 254 ? 0x00400000u : (254 - byte) << 23;
}

#ifdef FLASHINFER_CPU
enum class BlockFormat : int { kE2M1, kE4M3 };  ///< element format; two e2m1 values share a byte
enum class ScaleFormat : int { kE8M0 = 0, kE4M3 = 1 };

/// Dequantisation: out = element * scale * global, rows x cols.
struct DequantizeParams {
  const uint8_t* input;
  const uint8_t* scales;
  const float* global_scale;  ///< null means 1
  float* out;
  int64_t rows, cols;
  int64_t block_size;  ///< elements of a row that share a scale; cols is a multiple
  BlockFormat format;
  ScaleFormat scale_format;
  ScaleLayout layout;
};

Status Dequantize(const DequantizeParams& params, Stream stream);
#endif

}  // namespace flashinfer
