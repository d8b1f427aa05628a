// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations by 1 x 128 blocks on CUDA: 16 lanes per block of 128 columns, 8 elements per lane.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "quantize_1x128.h"

namespace flashinfer {
namespace gemm {

constexpr int QUANTIZE_ROWS = 8;       // rows per thread block: 8 scales are a sector of 32 bytes
constexpr int QUANTIZE_UNROLL = 4;     // column blocks per lane whose loads are in flight together
constexpr int QUANTIZE_THREADS = 256;  // 16 groups of 16 lanes: 8 rows by 2 halves of 4 blocks

/// Multiply 8 elements by `q` in fp32 and convert to 8 codes. The conversion saturates: amax * q may round to just
/// above 448.
template <typename T>
__device__ __forceinline__ uint2 Encode8(const T (&x)[8], float q) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 pair = {float(x[4 * i + 2 * j]) * q, float(x[4 * i + 2 * j + 1]) * q};
      word |= uint32_t(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (16 * j);
    }
    words[i] = word;
  }
  return {words[0], words[1]};
}

template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) Quantize1x128Kernel(const Quantize1x128Params p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int64_t row = int64_t(blockIdx.x) * QUANTIZE_ROWS + group / 2;
  const int first = (blockIdx.y * 2 + group % 2) * QUANTIZE_UNROLL;
  const bool has_row = row < p.rows;  // no early exit: lanes of two rows share a warp's shuffles
  const T* const input = static_cast<const T*>(p.input) + row * p.input_stride;
  uint4 raw[QUANTIZE_UNROLL];
#pragma unroll
  for (int i = 0; i < QUANTIZE_UNROLL; ++i) {
    raw[i] = uint4{};
    if (has_row && first + i < p.blocks) {
      raw[i] = *reinterpret_cast<const uint4*>(input + (first + i) * 128 + lane * 8);
    }
  }
#pragma unroll
  for (int i = 0; i < QUANTIZE_UNROLL; ++i) {
    const T(&x)[8] = reinterpret_cast<const T(&)[8]>(raw[i]);
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(float(x[j])));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
    if (!has_row || first + i >= p.blocks) continue;
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    uint8_t* const codes = p.codes + row * p.code_stride + (first + i) * 128 + lane * 8;
    *reinterpret_cast<uint2*>(codes) = Encode8(x, q);
    if (lane == 0) p.scales[(first + i) * p.scale_stride + row] = 1.f / q;
  }
}

template <typename T>
Status Quantize1x128(const Quantize1x128Params& p, Stream stream) {
  if (p.rows == 0 || p.blocks == 0) return cudaSuccess;
  const dim3 grid(unsigned(CeilDiv(p.rows, QUANTIZE_ROWS)), unsigned(CeilDiv(p.blocks, 2 * QUANTIZE_UNROLL)));
  return Launch(Quantize1x128Kernel<T>, grid, dim3(QUANTIZE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace gemm
}  // namespace flashinfer
