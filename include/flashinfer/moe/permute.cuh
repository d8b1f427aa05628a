// SPDX-License-Identifier: Apache-2.0
// Activations in expert order, and back, on CUDA; parameters in permute.h. Bound by DRAM, few tokens by latency.
//
//   MoePermuteKernel          a block copies a part of one row; each thread has up to 4 vectors of 16 bytes in flight
//   MoePermuteFp8Kernel       the same with a conversion: 8 elements per thread and step
//   MoePermuteFp8BlockKernel  16 lanes per 128 columns, as in quantize_1x128.cuh
//   MoeFinalizeKernel         a thread adds 8 columns (4 of fp32) of all slots of a token, 4 slots in flight
//
// Tensors whose rows are not aligned to a vector are handled one element at a time.
//   test  pytest tests/fused_moe/test_moe_permute.py      bench  python benchmarks/bench_moe_permute.py
#pragma once
#include "../quantize_1x128.cuh"
#include "permute.h"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "../vec_dtypes.cuh"

namespace flashinfer {
namespace moe {

constexpr int PERMUTE_THREADS = 128;
constexpr int PERMUTE_UNROLL = 4;  // vectors of a thread in flight

/// Return the token of a row, or -1. Blocks of one row take the same path.
__device__ __forceinline__ int64_t TokenOf(const MoePermuteParams& p, int64_t row) {
  const int pair = p.row_to_pair[row], token = pair / p.top_k;
  return pair < 0 || token >= p.tokens ? -1 : token;
}

/// Kernel: copy rows by words of a type; strides and columns count words.
template <typename Word>
__global__ void __launch_bounds__(PERMUTE_THREADS) MoePermuteKernel(const __grid_constant__ MoePermuteParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t row = blockIdx.x, token = TokenOf(p, row);
  if (token < 0) return;
  const Word* const input = static_cast<const Word*>(p.input) + token * p.input_stride;
  Word* const output = static_cast<Word*>(p.output) + row * p.output_stride;
  const int64_t first = int64_t(blockIdx.y) * PERMUTE_THREADS * PERMUTE_UNROLL + threadIdx.x;
  Word words[PERMUTE_UNROLL];
#pragma unroll
  for (int i = 0; i < PERMUTE_UNROLL; ++i) {
    const int64_t column = first + i * PERMUTE_THREADS;
    if (column < p.columns) words[i] = input[column];
  }
#pragma unroll
  for (int i = 0; i < PERMUTE_UNROLL; ++i) {
    const int64_t column = first + i * PERMUTE_THREADS;
    if (column < p.columns) output[column] = words[i];
  }
}

/// Kernel: copy rows to e4m3, VEC elements per thread and step; `columns` is a multiple of VEC.
template <typename T, int VEC>
__global__ void __launch_bounds__(PERMUTE_THREADS) MoePermuteFp8Kernel(const __grid_constant__ MoePermuteParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t row = blockIdx.x, token = TokenOf(p, row);
  if (token < 0) return;
  const float factor = p.factor == nullptr ? 1.f : *p.factor;
  const T* const input = static_cast<const T*>(p.input) + token * p.input_stride;
  uint8_t* const output = static_cast<uint8_t*>(p.output) + row * p.output_stride;
  const int64_t first = (int64_t(blockIdx.y) * PERMUTE_THREADS * PERMUTE_UNROLL + threadIdx.x) * VEC;
  Vec<T, VEC> vectors[PERMUTE_UNROLL];
#pragma unroll
  for (int i = 0; i < PERMUTE_UNROLL; ++i) {
    const int64_t column = first + i * PERMUTE_THREADS * VEC;
    if (column < p.columns) vectors[i] = Vec<T, VEC>::Load(input + column);
  }
#pragma unroll
  for (int i = 0; i < PERMUTE_UNROLL; ++i) {
    const int64_t column = first + i * PERMUTE_THREADS * VEC;
    float x[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = vectors[i].Float(j) * factor;
    if (column < p.columns) StoreFp8(output + column, x, __NV_E4M3);
  }
}

constexpr int BLOCK_UNROLL = 4;  // blocks of 128 columns per group of 16 lanes

/// Kernel: copy rows to e4m3 with a scale for 128 columns.
template <typename T>
__global__ void __launch_bounds__(PERMUTE_THREADS)
    MoePermuteFp8BlockKernel(const __grid_constant__ MoePermuteParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t row = blockIdx.x, token = TokenOf(p, row);
  if (token < 0) return;
  const int lane = threadIdx.x % 16, groups = PERMUTE_THREADS / 16, blocks = int(p.columns / 128);
  const int first = blockIdx.y * groups * BLOCK_UNROLL + threadIdx.x / 16;
  const T* const input = static_cast<const T*>(p.input) + token * p.input_stride + lane * 8;
  uint8_t* const output = static_cast<uint8_t*>(p.output) + row * p.output_stride + lane * 8;
  uint4 raw[BLOCK_UNROLL];
#pragma unroll
  for (int i = 0; i < BLOCK_UNROLL; ++i) {
    const int block = first + i * groups;
    raw[i] = block < blocks ? *reinterpret_cast<const uint4*>(input + block * 128) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < BLOCK_UNROLL; ++i) {
    const int block = first + i * groups;
    const T(&x)[8] = reinterpret_cast<const T(&)[8]>(raw[i]);
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(float(x[j])));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
    if (block >= blocks) continue;
    const float q = amax == 0.f ? 1.f : 448.f / amax;
    *reinterpret_cast<uint2*>(output + block * 128) = gemm::Encode8(x, q);
    if (lane == 0) p.scales[block * p.scale_stride + row] = 1.f / q;
  }
}

template <typename Out, int VEC>
__device__ __forceinline__ void StoreRounded(Out* p, const float (&x)[VEC]) {
  if constexpr (sizeof(Out) * VEC <= 16) {
    RoundTo<Out, VEC>(x).Store(p);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; i += 4) {
      *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
}

template <typename In, int VEC>
__device__ __forceinline__ void LoadAsFloats(const In* p, float (&x)[VEC]) {
  if constexpr (sizeof(In) * VEC <= 16) {
    const auto vector = Vec<In, VEC>::Load(p);
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = vector.Float(i);
  } else {
    LoadFloats(p, x);
  }
}

constexpr int FINALIZE_THREADS = 128;
constexpr int FINALIZE_SLOTS = 4;  // slots in flight

/// Kernel: add up the rows of a token, VEC columns per thread; `columns` is a multiple of VEC.
template <typename In, typename Out, int VEC>
__global__ void __launch_bounds__(FINALIZE_THREADS)
    MoeFinalizeKernel(const __grid_constant__ MoeFinalizeParams<In, Out> p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * FINALIZE_THREADS + threadIdx.x) * VEC;
  if (column >= p.columns) return;
  float sum[VEC] = {};
  for (int first = 0; first < p.top_k; first += FINALIZE_SLOTS) {
    float x[FINALIZE_SLOTS][VEC], scales[FINALIZE_SLOTS];
#pragma unroll
    for (int i = 0; i < FINALIZE_SLOTS; ++i) {
      const int64_t pair = token * p.top_k + first + i;
      const int64_t number = first + i < p.top_k ? p.pair_to_row[pair] : -1, row = number < p.num_rows ? number : -1;
      scales[i] = row < 0 ? 0.f : p.scales == nullptr ? 1.f : p.scales[pair];
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[i][j] = 0.f;
      if (row >= 0) LoadAsFloats(p.rows + row * p.row_stride + column, x[i]);
    }
#pragma unroll
    for (int i = 0; i < FINALIZE_SLOTS; ++i) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] = fmaf(scales[i], x[i][j], sum[j]);
    }
  }
  StoreRounded(p.output + token * p.output_stride + column, sum);
}

inline Status CheckGrid(int64_t rows, int64_t parts) {
  return rows > INT32_MAX || parts > 65535 ? cudaErrorInvalidValue : cudaSuccess;
}

template <typename Word>
Status CopyRows(const MoePermuteParams& p, Stream stream) {
  const int64_t parts = CeilDiv(p.columns, PERMUTE_THREADS * PERMUTE_UNROLL);
  if (const Status status = CheckGrid(p.rows, parts); status != cudaSuccess) return status;
  return Launch(MoePermuteKernel<Word>, dim3(p.rows, parts), dim3(PERMUTE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace moe

template <typename T>
Status MoePermute(const MoePermuteParams& p, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  constexpr int VEC = 16 / sizeof(T);
  const bool aligned = IsAligned(p.input, 16) && IsAligned(p.output, 16) && p.columns % VEC == 0 &&
                       p.input_stride % VEC == 0 && p.output_stride % VEC == 0;
  if (!aligned) return moe::CopyRows<T>(p, stream);
  MoePermuteParams words = p;
  words.columns /= VEC;
  words.input_stride /= VEC;
  words.output_stride /= VEC;
  return moe::CopyRows<uint4>(words, stream);
}

template <typename T>
Status MoePermuteFp8(const MoePermuteParams& p, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  constexpr int VEC = 8;
  const bool aligned = IsAligned(p.input, 16) && IsAligned(p.output, 8) && p.columns % VEC == 0 &&
                       p.input_stride % VEC == 0 && p.output_stride % VEC == 0;
  const int64_t parts = CeilDiv(p.columns, moe::PERMUTE_THREADS * moe::PERMUTE_UNROLL * (aligned ? VEC : 1));
  if (const Status status = moe::CheckGrid(p.rows, parts); status != cudaSuccess) return status;
  auto kernel = aligned ? moe::MoePermuteFp8Kernel<T, VEC> : moe::MoePermuteFp8Kernel<T, 1>;
  return Launch(kernel, dim3(p.rows, parts), dim3(moe::PERMUTE_THREADS), p.enable_pdl, stream, p);
}

template <typename T>
Status MoePermuteFp8Block(const MoePermuteParams& p, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const int64_t parts = CeilDiv(p.columns, moe::PERMUTE_THREADS / 16 * moe::BLOCK_UNROLL * 128);
  if (const Status status = moe::CheckGrid(p.rows, parts); status != cudaSuccess) return status;
  return Launch(moe::MoePermuteFp8BlockKernel<T>, dim3(p.rows, parts), dim3(moe::PERMUTE_THREADS), p.enable_pdl, stream,
                p);
}

template <typename In, typename Out>
Status MoeFinalize(const MoeFinalizeParams<In, Out>& p, Stream stream) {
  if (p.tokens == 0 || p.columns == 0) return cudaSuccess;
  constexpr int VEC = sizeof(In) == 4 && sizeof(Out) == 4 ? 4 : 8;
  constexpr int IN_WORD = 16 / sizeof(In), OUT_WORD = 16 / sizeof(Out);
  const bool aligned = IsAligned(p.rows, 16) && IsAligned(p.output, 16) && p.columns % VEC == 0 &&
                       p.row_stride % IN_WORD == 0 && p.output_stride % OUT_WORD == 0;
  const int64_t parts = CeilDiv(p.columns, moe::FINALIZE_THREADS * (aligned ? VEC : 1));
  if (const Status status = moe::CheckGrid(p.tokens, parts); status != cudaSuccess) return status;
  auto kernel = aligned ? moe::MoeFinalizeKernel<In, Out, VEC> : moe::MoeFinalizeKernel<In, Out, 1>;
  return Launch(kernel, dim3(p.tokens, parts), dim3(moe::FINALIZE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
