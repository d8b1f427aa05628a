// SPDX-License-Identifier: Apache-2.0
// Rows as operands of products on CUDA: rounding and quantisation. A warp writes 128 columns of a row, four per lane.
#pragma once
#include "layer.h"
#include "../utils.cuh"
#include "../vec_dtypes.cuh"

namespace flashinfer {
namespace fused_moe {

constexpr int ROW_WARPS = 8, ROW_THREADS = ROW_WARPS * 32;
constexpr int WARP_COLUMNS = 128;

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

__device__ __forceinline__ float MaxMagnitude(const float (&x)[4]) {
  return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
}

template <typename T, int COUNT>
__device__ __forceinline__ void LoadFloats(const void* data, int64_t index, float (&x)[COUNT]) {
  const auto v = Vec<T, COUNT>::Load(static_cast<const T*>(data) + index);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = v.Float(i);
}

/// Return e4m3 of four values times `q`.
__device__ __forceinline__ uint32_t FourCodes(const float (&x)[4], float q) {
  return Fp8Pair(x[0] * q, x[1] * q, __NV_E4M3) | Fp8Pair(x[2] * q, x[3] * q, __NV_E4M3) << 16;
}

/// Return four e4m3 codes as bf16, exactly.
__device__ __forceinline__ uint2 WideCodes(uint32_t codes) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(codes >> 8 * i), __NV_E4M3)));
  }
  const auto rounded = RoundTo<__nv_bfloat16, 4>(x);
  uint2 words;
  rounded.Store(reinterpret_cast<__nv_bfloat16*>(&words));
  return words;
}

/// Return the largest magnitude of a row over the block, in every thread.
template <typename Source>
__device__ __forceinline__ float RowMax(int columns, const Source& source) {
  __shared__ float warps[ROW_WARPS];
  float most = 0.f;
  for (int column = threadIdx.x * 4; column < columns; column += ROW_THREADS * 4) {
    float x[4];
    source(column, x);
    most = fmaxf(most, MaxMagnitude(x));
  }
  most = WarpMax(most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROW_WARPS; ++i) most = fmaxf(most, warps[i]);
  return most;
}

/// Write equal rows. source(column, x) gives four columns, for_each_row(f) calls f(row) for each row; T is the element of
/// kElement. Blocks along y share the columns.
template <Rounding ROUNDING, typename T, typename Source, typename Rows>
__device__ __forceinline__ void WriteRows(const Operand& to, const Rows& for_each_row, int expert,
                                          const Source& source) {
  const int lane = threadIdx.x % 32, columns = int(to.columns);
  float q = 1.f;
  if constexpr (ROUNDING == Rounding::kRows) {
    const float amax = RowMax(columns, source);
    q = amax == 0.f ? 1.f : 448.f / amax;
    if (threadIdx.x == 0 && blockIdx.y == 0) for_each_row([&](int64_t row) { to.scales[row] = 1.f / q; });
  } else if constexpr (ROUNDING == Rounding::kFactor) {
    q = to.factor[to.is_factor_of_expert ? expert : 0];
  }
  const int first = (blockIdx.y * ROW_WARPS + threadIdx.x / 32) * WARP_COLUMNS;
  for (int begin = first; begin < columns; begin += gridDim.y * ROW_WARPS * WARP_COLUMNS) {  // warps stay together
    const int column = begin + lane * 4;
    const bool has_columns = column < columns;
    float x[4] = {};
    if (has_columns) source(column, x);
    if constexpr (ROUNDING == Rounding::kElement) {
      const auto rounded = RoundTo<T, 4>(x);
      if (has_columns) {
        for_each_row([&](int64_t row) { rounded.Store(static_cast<T*>(to.data) + row * to.columns + column); });
      }
      continue;
    }
    if constexpr (ROUNDING == Rounding::kBlocks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
      const float amax = WarpMax(MaxMagnitude(x));
      q = amax == 0.f ? 1.f : 448.f / amax;
      if (lane == 0) {
        for_each_row([&](int64_t row) { to.scales[begin / WARP_COLUMNS * to.scale_stride + row] = 1.f / q; });
      }
    }
    if constexpr (ROUNDING == Rounding::kColumns) {
      if (has_columns && to.column_factors != nullptr) {
        float factors[4];
        LoadFloats<__nv_bfloat16>(to.column_factors, column, factors);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= factors[i];
      }
    }
    if (!has_columns) continue;
    const uint32_t codes = FourCodes(x, q);
    if (ROUNDING == Rounding::kColumns && to.element == Element::kBFloat16) {
      const uint2 wide = WideCodes(codes);
      for_each_row([&](int64_t row) {
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(to.data) + row * to.columns + column) = wide;
      });
      continue;
    }
    for_each_row([&](int64_t row) {
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(to.data) + row * to.columns + column) = codes;
    });
  }
}

/// Blocks along y for rows of so many columns: a warp for each 128 columns, unless a block must see the whole row.
inline unsigned RowBlocks(const Operand& to) {
  return to.rounding == Rounding::kRows ? 1 : unsigned(CeilDiv(to.columns, ROW_WARPS * WARP_COLUMNS));
}

/// Write the rows of a token, as in WriteRows. kElement copies 16 bytes per thread of rows whose In is any type of their
/// size.
template <typename In, Rounding ROUNDING, typename Rows>
__device__ __forceinline__ void PermuteToken(const PermuteParams& p, int64_t token, const Rows& for_each_row) {
  const int64_t begin = token * p.input_stride;
  if constexpr (ROUNDING == Rounding::kElement) {
    const int vectors = int(p.output.columns * sizeof(In) / 16);
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const In*>(p.input) + begin);
    auto* const to = static_cast<uint4*>(p.output.data);
    for (int i = blockIdx.y * ROW_THREADS + threadIdx.x; i < vectors; i += gridDim.y * ROW_THREADS) {
      const uint4 x = from[i];
      for_each_row([&](int64_t row) { to[row * vectors + i] = x; });
    }
  } else {
    WriteRows<ROUNDING, In>(p.output, for_each_row, 0,
                            [&](int column, float (&x)[4]) { LoadFloats<In>(p.input, begin + column, x); });
  }
}

/// Blocks along y of a permutation.
inline unsigned PermuteBlocks(const PermuteParams& p) {
  if (p.output.rounding != Rounding::kElement) return RowBlocks(p.output);
  return unsigned(CeilDiv(p.output.columns * (p.element == Element::kE4M3 ? 1 : 2), 16 * ROW_THREADS));
}

}  // namespace fused_moe
}  // namespace flashinfer
