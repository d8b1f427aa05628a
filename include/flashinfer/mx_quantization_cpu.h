// SPDX-License-Identifier: Apache-2.0
// Block-scaled formats on the CPU; parameters in mx_quantization.h.
//   test  pytest tests/quantization      bench  python benchmarks/bench_quantization.py
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/fp4.h"
#include "cpu/parallel.h"
#include "mx_quantization.h"

namespace flashinfer {
namespace cpu {

/// Return the largest of N lanes, by comparing the upper half with the lower half. N is a power of two.
template <int N>
inline float MaxLanes(const float* lane) {
  if constexpr (N == 1) {
    return lane[0];
  } else {
    float most[N / 2];
    for (int i = 0; i < N / 2; ++i) most[i] = lane[i] > lane[i + N / 2] ? lane[i] : lane[i + N / 2];
    return MaxLanes<N / 2>(most);
  }
}

/// Return the largest magnitude of a block. NaN is ignored.
template <typename T>
inline float BlockMaximum(const T* x) {
  Vec most{};
  for (int i = 0; i < MX_BLOCK; i += LANES) {
    const Vec magnitude = BitCast<Vec>(BitCast<UintVec>(Load(x + i)) & 0x7FFFFFFFu);
    most = magnitude > most ? magnitude : most;
  }
  float lanes[LANES];
  Store(lanes, most);
  return MaxLanes<LANES>(lanes);
}

/// Write zeros to the padding of a swizzled layout: columns of the last tile, rows after the last row.
inline void ClearPadding(uint8_t* scales, const ScaleGrid& grid) {
  const int64_t rows = grid.PaddedRows(), cols = grid.PaddedCols();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = row < grid.rows ? grid.cols : 0; col < cols; ++col) scales[grid.Index(row, col)] = 0;
  }
}

template <BlockFormat FORMAT>
inline Vec LoadElements(const uint8_t* row, int64_t col) {
  if constexpr (FORMAT == BlockFormat::kE2M1) return LoadE2M1(row + col / 2);
  return Load(reinterpret_cast<const float8_e4m3*>(row) + col);
}

template <BlockFormat FORMAT>
inline float LoadElement(const uint8_t* row, int64_t col) {
  return FORMAT == BlockFormat::kE2M1 ? DecodeE2M1(row, col) : DecodeE4M3(row[col]);
}

template <BlockFormat FORMAT>
inline void DequantizeRows(const DequantizeParams& p) {
  const float global = p.global_scale == nullptr ? 1.0f : *p.global_scale;
  const ScaleGrid grid{p.rows, p.cols / p.block_size, p.layout};
  ParallelFor(p.rows, p.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* row = p.input + r * p.cols / (FORMAT == BlockFormat::kE2M1 ? 2 : 1);
      float* out = p.out + r * p.cols;
      for (int64_t b = 0; b < grid.cols; ++b) {
        const uint8_t byte = p.scales[grid.Index(r, b)];
        const float scale = p.scale_format == ScaleFormat::kE4M3 ? DecodeE4M3(byte) : DecodeE8M0(byte);
        int64_t i = b * p.block_size;
        const int64_t stop = i + p.block_size;
        for (; i + LANES <= stop; i += LANES) Store(out + i, LoadElements<FORMAT>(row, i) * scale * global);
        for (; i < stop; ++i) out[i] = LoadElement<FORMAT>(row, i) * scale * global;
      }
    }
  });
}

}  // namespace cpu

template <typename T>
Status Mxfp8Quantize(const Mxfp8QuantizeParams<T>& p, Stream) {
  const int64_t cols = p.grid.cols * MX_BLOCK;
  cpu::ClearPadding(p.scales, p.grid);
  cpu::ParallelFor(p.grid.rows, cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t b = 0; b < p.grid.cols; ++b) {
        const int64_t at = r * cols + b * MX_BLOCK;
        const uint32_t byte = ScaleByte(cpu::BitCast<uint32_t>(cpu::BlockMaximum(p.input + at) / 448.0f));
        const float factor = cpu::BitCast<float>(InverseScaleBits(byte));
        auto* out = reinterpret_cast<cpu::float8_e4m3*>(p.out + at);
        for (int i = 0; i < MX_BLOCK; i += cpu::LANES) cpu::Store(out + i, cpu::Load(p.input + at + i) * factor);
        p.scales[p.grid.Index(r, b)] = static_cast<uint8_t>(byte);
      }
    }
  });
  return 0;
}

template <typename U>
Status BlockScaleInterleave(const InterleaveParams<U>& p, Stream) {
  const int64_t tiles = p.grid.PaddedRows() / 128, cols = p.grid.PaddedCols(), whole = p.grid.cols / 4 * 4;
  const U zeros[4] = {};
  cpu::ParallelFor(p.batch_size * tiles, 128 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t batch = t / tiles, first = t % tiles * 128;
      const U* input = p.input + batch * p.grid.rows * p.grid.cols;
      U* out = p.out + batch * p.grid.Size() + first * cols;
      for (int64_t r = 0; r < 32; ++r) {  // four rows at once: their scales lie side by side
        for (int64_t col = 0; col < cols; col += 4) {
          U* to = out + col * 128 + r * 16;
          for (int64_t row = first + r; row < first + 128; row += 32, to += 4) {
            const U* from = row < p.grid.rows ? input + row * p.grid.cols + col : zeros;
            if (col < whole || from == zeros) {
              std::memcpy(to, from, sizeof(zeros));  // a constant size is one load and one store
            } else {
              std::memcpy(to, zeros, sizeof(zeros));
              std::memcpy(to, from, static_cast<size_t>(p.grid.cols - whole) * sizeof(U));
            }
          }
        }
      }
    }
  });
  return 0;
}

inline Status Dequantize(const DequantizeParams& p, Stream) {
  if (p.format == BlockFormat::kE2M1) {
    cpu::DequantizeRows<BlockFormat::kE2M1>(p);
  } else {
    cpu::DequantizeRows<BlockFormat::kE4M3>(p);
  }
  return 0;
}

}  // namespace flashinfer
