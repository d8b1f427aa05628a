// SPDX-License-Identifier: Apache-2.0
// Block-scaled formats on CUDA; parameters in mx_quantization.h. Bound by DRAM.
//
//   Mxfp8QuantizeKernel   a thread takes 32 bytes of a row; 2 lanes (4 for fp32) hold a block of 32 and agree on its
//                         maximum by shuffles. The grid covers the padded scales, whose blocks only write a zero.
//   InterleaveKernel      a thread writes 16 scales: 4 columns of 4 rows that lie 32 apart, which is what the 128 x 4
//                         layout puts side by side. Eight neighbouring threads share a row of the input.
//   test  pytest tests/quantization      bench  python benchmarks/bench_quantization.py
#pragma once
#include "mx_quantization.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace mx {

constexpr int THREADS = 128;

/// Quantise to MXFP8. ALIGNED: the input is aligned to 16 bytes.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) Mxfp8QuantizeKernel(const __grid_constant__ Mxfp8QuantizeParams<T> p) {
  constexpr int WORD = 16 / sizeof(T), VEC = 2 * WORD, LANES = MX_BLOCK / VEC;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t row = blockIdx.x;
  const int64_t block = int64_t(blockIdx.y) * (THREADS / LANES) + threadIdx.x / LANES;
  const bool inside = row < p.grid.rows && block < p.grid.cols;
  const int64_t at = (row * p.grid.cols + block) * MX_BLOCK + threadIdx.x % LANES * VEC;
  Vec<T, WORD> x[2] = {Vec<T, WORD>::Zero(), Vec<T, WORD>::Zero()};
  if (inside) {
    if constexpr (ALIGNED) {
      x[0] = Vec<T, WORD>::Load(p.input + at);
      x[1] = Vec<T, WORD>::Load(p.input + at + WORD);
    } else {
#pragma unroll
      for (int i = 0; i < VEC; ++i) x[i / WORD][i % WORD] = p.input[at + i];
    }
  }
  float y[VEC], most = 0.f;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    y[i] = x[i / WORD].Float(i % WORD);
    most = fmaxf(most, fabsf(y[i]));  // fmaxf passes over NaN
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  const uint32_t byte = ScaleByte(__float_as_uint(__fdiv_rn(most, 448.f)));
  const float factor = __uint_as_float(InverseScaleBits(byte));
#pragma unroll
  for (int i = 0; i < VEC; ++i) y[i] *= factor;
  if (inside) StoreFp8<VEC>(p.out + at, y, __NV_E4M3);
  if (threadIdx.x % LANES == 0 && block < p.grid.PaddedCols()) p.scales[p.grid.Index(row, block)] = uint8_t(byte);
}

/// Interleave scales. VECTOR: 4 columns of a row are one aligned load.
template <typename U, bool VECTOR>
__global__ void __launch_bounds__(256) InterleaveKernel(const __grid_constant__ InterleaveParams<U> p) {
  using Four = Vec<U, 4>;
  const int64_t col = (int64_t(blockIdx.x) * 8 + threadIdx.x % 8) * 4,
                row = int64_t(blockIdx.y) * 128 + threadIdx.x / 8;
  if (col >= p.grid.PaddedCols()) return;
  for (int64_t batch = blockIdx.z; batch < p.batch_size; batch += gridDim.z) {
    const U* input = p.input + batch * p.grid.rows * p.grid.cols + col;
    alignas(16) Four four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = row + 32 * i;
      four[i] = Four::Zero();
      if (r >= p.grid.rows) continue;
      if constexpr (VECTOR) {
        four[i] = Four::Load(input + r * p.grid.cols);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (col + c < p.grid.cols) four[i][c] = input[r * p.grid.cols + c];
        }
      }
    }
    uint4* out = reinterpret_cast<uint4*>(p.out + batch * p.grid.Size() + p.grid.Index(row, col));
#pragma unroll
    for (int i = 0; i < int(sizeof(four) / 16); ++i) out[i] = reinterpret_cast<const uint4*>(four)[i];
  }
}

}  // namespace mx

template <typename T>
Status Mxfp8Quantize(const Mxfp8QuantizeParams<T>& p, Stream stream) {
  constexpr int BLOCKS = mx::THREADS * 32 / sizeof(T) / MX_BLOCK;  // MX blocks of 32 elements per thread block
  const int64_t rows = p.grid.PaddedRows(), tiles = CeilDiv(p.grid.PaddedCols(), BLOCKS);
  if (rows == 0 || tiles == 0) return cudaSuccess;
  if (rows > INT32_MAX || tiles > 65535) return cudaErrorInvalidValue;
  auto kernel = IsAligned(p.input, 16) ? mx::Mxfp8QuantizeKernel<T, true> : mx::Mxfp8QuantizeKernel<T, false>;
  return Launch(kernel, dim3(rows, tiles), dim3(mx::THREADS), p.enable_pdl, stream, p);
}

template <typename U>
Status BlockScaleInterleave(const InterleaveParams<U>& p, Stream stream) {
  const int64_t tiles = CeilDiv(p.grid.PaddedCols(), 32), row_tiles = p.grid.PaddedRows() / 128;
  if (tiles == 0 || row_tiles == 0 || p.batch_size == 0) return cudaSuccess;
  if (tiles > INT32_MAX || row_tiles > 65535) return cudaErrorInvalidValue;
  const bool vector = p.grid.cols % 4 == 0 && IsAligned(p.input, 4 * sizeof(U));
  auto kernel = vector ? mx::InterleaveKernel<U, true> : mx::InterleaveKernel<U, false>;
  const dim3 grid(tiles, row_tiles, unsigned(std::min<int64_t>(p.batch_size, 65535)));
  return Launch(kernel, grid, dim3(256), false, stream, p);
}

}  // namespace flashinfer
