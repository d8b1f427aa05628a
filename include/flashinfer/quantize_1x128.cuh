// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations by 1 x 128 blocks on CUDA: 8 lanes per block of 128 columns, 16 elements per lane.
// Bound by memory.
//   test  pytest tests/hopper/test_quantize_1x128.py tests/gemm/test_quantize_1x128.py
//   bench  python benchmarks/bench_gemm.py
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "quantize_1x128.h"

namespace flashinfer {
namespace gemm {

constexpr int QUANTIZE_ROWS = 8;       // rows per thread block: 8 scales are a sector of 32 bytes
constexpr int QUANTIZE_LANES = 8;      // lanes per block of 128 columns
constexpr int QUANTIZE_UNROLL = 2;     // column blocks per lane whose loads are in flight together
constexpr int QUANTIZE_THREADS = 256;  // 32 groups of 8 lanes: 8 rows by 4 pairs of column blocks
constexpr int QUANTIZE_BLOCKS = QUANTIZE_THREADS / QUANTIZE_LANES / QUANTIZE_ROWS * QUANTIZE_UNROLL;

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, bfloat16_t>, __nv_bfloat162, __half2>;

/// Return the largest magnitude of 16 elements; NaN is ignored. Pairs are compared at once, which is exact.
template <typename T>
__device__ __forceinline__ float AbsMax16(const uint4 (&raw)[2]) {
  const auto& x = reinterpret_cast<const Pair<T>(&)[8]>(raw);
  Pair<T> most = __habs2(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) most = __hmax2(most, __habs2(x[i]));
  return fmaxf(float(most.x), float(most.y));
}

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
  const int lane = threadIdx.x % QUANTIZE_LANES, group = threadIdx.x / QUANTIZE_LANES;
  const int64_t row = int64_t(blockIdx.x) * QUANTIZE_ROWS + group % QUANTIZE_ROWS;
  const int first = blockIdx.y * QUANTIZE_BLOCKS + group / QUANTIZE_ROWS * QUANTIZE_UNROLL;
  const bool has_row = row < p.rows;  // no early exit: lanes of several rows share a warp's shuffles
  const T* const input = static_cast<const T*>(p.input) + row * p.input_stride;
  uint4 raw[QUANTIZE_UNROLL][2];
#pragma unroll
  for (int i = 0; i < QUANTIZE_UNROLL; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raw[i][half] = uint4{};
      if (has_row && first + i < p.blocks) {
        raw[i][half] = *reinterpret_cast<const uint4*>(input + (first + i) * 128 + half * 64 + lane * 8);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < QUANTIZE_UNROLL; ++i) {
    float amax = AbsMax16<T>(raw[i]);
#pragma unroll
    for (int offset = QUANTIZE_LANES / 2; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
    }
    if (!has_row || first + i >= p.blocks) continue;
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    uint8_t* const codes = p.codes + row * p.code_stride + (first + i) * 128 + lane * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint2*>(codes + half * 64) = Encode8(reinterpret_cast<const T(&)[8]>(raw[i][half]), q);
    }
    if (lane == 0) p.scales[(first + i) * p.scale_stride + row] = 1.f / q;
  }
}

template <typename T>
Status Quantize1x128(const Quantize1x128Params& p, Stream stream) {
  if (p.rows == 0 || p.blocks == 0) return cudaSuccess;
  const dim3 grid(unsigned(CeilDiv(p.rows, QUANTIZE_ROWS)), unsigned(CeilDiv(p.blocks, QUANTIZE_BLOCKS)));
  return Launch(Quantize1x128Kernel<T>, grid, dim3(QUANTIZE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace gemm
}  // namespace flashinfer
