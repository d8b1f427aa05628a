// SPDX-License-Identifier: Apache-2.0
// RMSNorm and LayerNorm on CUDA (formulas and parameters: norm.h). Bound by DRAM: each row is read once and written once.
//
// A row belongs to a group of threads: 1 to 32 lanes of a warp for rows up to 2 KB, a whole block beyond. Thread t of a
// group of G holds the vectors t, t + G, t + 2G, ... of its row in registers (VEC elements each, 16 bytes when everything
// is aligned, else one element); what does not fit there is read again from L2 after the reduction.
//
//   rows <= 512 B   NVEC 1, 4 rows per group in flight        (qk-norm: many short rows)
//   rows <= 1 KB    NVEC 2, 2 rows per group
//   rows <= 2 KB    NVEC 4, a warp per row
//   longer          a block per row, NVEC 4 (2 for few rows: latency), up to 1024 threads
//   unaligned       a block per row, one element per access
//
// Weights are read once per row through L1, which the row itself bypasses.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include <algorithm>

#include "norm.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

constexpr int64_t FEW_ROWS = 1024;  // up to here a call is latency, not bandwidth


__device__ __forceinline__ int64_t RowOffset(int64_t row, int64_t heads, RowStride stride) {
  if (heads == 1) return row * stride.batch;
  return row / heads * stride.batch + row % heads * stride.head;
}

__device__ __forceinline__ __nv_fp8_interpretation_t Fp8Kind(NormOut kind) {
  return kind == NormOut::kE4M3 ? __NV_E4M3 : __NV_E5M2;
}

/// Store VEC results as T, or as fp8 after the scale.
template <typename T, bool QUANT, int VEC>
__device__ __forceinline__ void StoreRow(void* out, int64_t offset, float (&y)[VEC], float inv_scale, NormOut kind) {
  if constexpr (QUANT) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) y[i] *= inv_scale;
    RoundToFp8<VEC>(y, Fp8Kind(kind)).Store(static_cast<uint8_t*>(out) + offset);
  } else {
    RoundTo<T, VEC>(y).Store(static_cast<T*>(out) + offset);
  }
}

/// One group of threads normalises ROWS rows. BLOCK_ROW: the group is the block (blockDim.y == 1), and rows longer than
/// its registers are allowed; otherwise it is blockDim.x lanes of a warp and the row must fit.
template <typename T, bool QUANT, bool RESIDUAL, int VEC, int NVEC, int ROWS, bool BLOCK_ROW>
__global__ void RMSNormKernel(const __grid_constant__ RMSNormParams<T> p) {
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();

  const int lane = threadIdx.x;
  const int step = blockDim.x * VEC;
  const int64_t first = (int64_t(blockIdx.x) * blockDim.y + threadIdx.y) * ROWS;
  const float inv_scale = QUANT && p.scale != nullptr ? 1.f / *p.scale : 1.f;

  // Issue every load of the row before the first use.
  Vec<T, VEC> x[ROWS][NVEC], add[RESIDUAL ? ROWS : 1][RESIDUAL ? NVEC : 1], w[NVEC];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool valid = first + r < p.num_rows;
    const T* row = p.input + RowOffset(first + r, p.heads, p.input_stride);
    const T* other = RESIDUAL ? p.residual + RowOffset(first + r, p.heads, p.residual_stride) : nullptr;
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      const int64_t column = lane * VEC + int64_t(v) * step;
      const bool inside = valid && column < p.hidden;
      x[r][v] = inside ? Vec<T, VEC>::LoadStream(row + column) : Vec<T, VEC>::Zero();
      if constexpr (RESIDUAL) add[r][v] = inside ? Vec<T, VEC>::LoadStream(other + column) : Vec<T, VEC>::Zero();
    }
  }
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int64_t column = lane * VEC + int64_t(v) * step;
    w[v] = column < p.hidden ? Vec<T, VEC>::Load(p.weight + column) : Vec<T, VEC>::Zero();
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int64_t row = first + r;
    const T* input = p.input + RowOffset(row, p.heads, p.input_stride);
    T* residual = RESIDUAL ? p.residual + RowOffset(row, p.heads, p.residual_stride) : nullptr;
    const int64_t out = RowOffset(row, p.heads, p.out_stride);

    auto value = [&](int v, int i) {
      if constexpr (RESIDUAL) return ToFloat(x[r][v][i]) + ToFloat(add[r][v][i]);
      return ToFloat(x[r][v][i]);
    };
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum += value(v, i) * value(v, i);
    }
    if constexpr (BLOCK_ROW) {
      for (int64_t column = lane * VEC + int64_t(NVEC) * step; column < p.hidden; column += step) {
        const auto tail = Vec<T, VEC>::Load(input + column);
        const auto more = RESIDUAL ? Vec<T, VEC>::Load(residual + column) : Vec<T, VEC>::Zero();
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float s = RESIDUAL ? ToFloat(tail[i]) + ToFloat(more[i]) : ToFloat(tail[i]);
          sum += s * s;
        }
      }
      sum = BlockSum(sum, scratch);
    } else {
      sum = GroupSum(sum, blockDim.x);
      if (row >= p.num_rows) continue;  // not return: lanes of other groups still shuffle
    }
    const float rstd = rsqrtf(sum / float(p.hidden) + p.eps);

    auto finish = [&](int64_t column, float (&s)[VEC], const Vec<T, VEC>& weight) {
      if constexpr (RESIDUAL) RoundTo<T, VEC>(s).Store(residual + column);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        s[i] = s[i] * rstd * (p.weight_bias + ToFloat(weight[i]));
        if (p.silu) s[i] = s[i] / (1.f + __expf(-s[i]));
      }
      StoreRow<T, QUANT, VEC>(p.out, out + column, s, inv_scale, p.out_kind);
    };
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      const int64_t column = lane * VEC + int64_t(v) * step;
      if (column < p.hidden) {
        float s[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) s[i] = value(v, i);
        finish(column, s, w[v]);
      }
    }
    if constexpr (BLOCK_ROW) {
      for (int64_t column = lane * VEC + int64_t(NVEC) * step; column < p.hidden; column += step) {
        const auto tail = Vec<T, VEC>::Load(input + column);
        const auto more = RESIDUAL ? Vec<T, VEC>::Load(residual + column) : Vec<T, VEC>::Zero();
        float s[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) s[i] = RESIDUAL ? ToFloat(tail[i]) + ToFloat(more[i]) : ToFloat(tail[i]);
        finish(column, s, Vec<T, VEC>::Load(p.weight + column));
      }
    }
  }
}

template <typename T, bool QUANT, bool RESIDUAL, int VEC, int NVEC, int ROWS, bool BLOCK_ROW>
cudaError_t LaunchRMSNorm(const RMSNormParams<T>& p, dim3 block, cudaStream_t stream) {
  const int64_t blocks = CeilDiv(p.num_rows, int64_t(block.y) * ROWS);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return Launch(RMSNormKernel<T, QUANT, RESIDUAL, VEC, NVEC, ROWS, BLOCK_ROW>, dim3(blocks), block, p.enable_pdl, stream, p);
}

template <typename T>
bool CanVectorise(const RMSNormParams<T>& p, int vec) {
  auto strides_divide = [&](RowStride s) { return s.batch % vec == 0 && s.head % vec == 0; };
  const size_t out_bytes = p.out_kind == NormOut::kSame ? 16 : vec;
  return p.hidden % vec == 0 && IsAligned(p.input, 16) && IsAligned(p.weight, 16) && IsAligned(p.out, out_bytes) &&
         strides_divide(p.input_stride) && strides_divide(p.out_stride) &&
         (p.residual == nullptr || (IsAligned(p.residual, 16) && strides_divide(p.residual_stride)));
}

template <typename T, bool QUANT, bool RESIDUAL>
cudaError_t DispatchRMSNorm(const RMSNormParams<T>& p, cudaStream_t stream) {
  constexpr int VEC = 16 / sizeof(T);
  constexpr int WARP_BLOCK = 128;  // threads of a block whose warps work alone
  auto threads_for = [&](int vec, int nvec) { return int(std::min<int64_t>(1024, CeilDiv(p.hidden, vec * nvec * 32) * 32)); };
  if (!CanVectorise(p, VEC)) {
    return LaunchRMSNorm<T, QUANT, RESIDUAL, 1, 8, 1, true>(p, dim3(threads_for(1, 8)), stream);
  }
  const int64_t vectors = p.hidden / VEC;
  if (vectors <= 32) {
    const int lanes = NextPowerOfTwo(int(vectors));
    return LaunchRMSNorm<T, QUANT, RESIDUAL, VEC, 1, 4, false>(p, dim3(lanes, WARP_BLOCK / lanes), stream);
  }
  if (vectors <= 64) return LaunchRMSNorm<T, QUANT, RESIDUAL, VEC, 2, 2, false>(p, dim3(32, WARP_BLOCK / 32), stream);
  if (vectors <= 128) return LaunchRMSNorm<T, QUANT, RESIDUAL, VEC, 4, 1, false>(p, dim3(32, WARP_BLOCK / 32), stream);
  if (p.num_rows <= FEW_ROWS) return LaunchRMSNorm<T, QUANT, RESIDUAL, VEC, 2, 1, true>(p, dim3(threads_for(VEC, 2)), stream);
  return LaunchRMSNorm<T, QUANT, RESIDUAL, VEC, 4, 1, true>(p, dim3(threads_for(VEC, 4)), stream);
}

/// Mean first, then the variance around it, both from registers.
template <bool QUANT, int VEC, int NVEC>
__global__ void LayerNormKernel(const __grid_constant__ LayerNormParams p) {
  using T = __nv_bfloat16;
  __shared__ float scratch[2][32];
  const int step = blockDim.x * VEC;
  const int begin = threadIdx.x * VEC;
  const int64_t row = blockIdx.x;
  const T* input = p.input + row * p.input_stride;
  const float inv_scale = QUANT ? 1.f / *p.scale : 1.f;

  Vec<T, VEC> x[NVEC];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int64_t column = begin + int64_t(v) * step;
    x[v] = column < p.hidden ? Vec<T, VEC>::LoadStream(input + column) : Vec<T, VEC>::Zero();
  }
  const int64_t tail = begin + int64_t(NVEC) * step;

  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += ToFloat(x[v][i]);
  }
  for (int64_t column = tail; column < p.hidden; column += step) {
    const auto more = Vec<T, VEC>::Load(input + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += ToFloat(more[i]);
  }
  const float mean = BlockSum(sum, scratch[0]) / float(p.hidden);

  float square = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    if (begin + int64_t(v) * step < p.hidden) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) square += (ToFloat(x[v][i]) - mean) * (ToFloat(x[v][i]) - mean);
    }
  }
  for (int64_t column = tail; column < p.hidden; column += step) {
    const auto more = Vec<T, VEC>::Load(input + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) square += (ToFloat(more[i]) - mean) * (ToFloat(more[i]) - mean);
  }
  const float rstd = rsqrtf(BlockSum(square, scratch[1]) / float(p.hidden) + p.eps);

  auto finish = [&](int64_t column, const Vec<T, VEC>& value) {
    float y[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      y[i] = (ToFloat(value[i]) - mean) * rstd * p.gamma[column + i] + p.beta[column + i];
      if constexpr (QUANT) y[i] = ToFloat(FromFloat<T>(y[i]));  // the contract quantises the bfloat16 result
    }
    StoreRow<T, QUANT, VEC>(p.out, row * p.out_stride + column, y, inv_scale, p.out_kind);
  };
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int64_t column = begin + int64_t(v) * step;
    if (column < p.hidden) finish(column, x[v]);
  }
  for (int64_t column = tail; column < p.hidden; column += step) finish(column, Vec<T, VEC>::Load(input + column));
}

template <bool QUANT>
cudaError_t DispatchLayerNorm(const LayerNormParams& p, cudaStream_t stream) {
  constexpr int VEC = 8;
  const bool vectorise = p.hidden % VEC == 0 && p.input_stride % VEC == 0 && p.out_stride % VEC == 0 &&
                         IsAligned(p.input, 16) && IsAligned(p.out, QUANT ? 8 : 16);
  auto threads_for = [&](int elements) { return dim3(std::min<int64_t>(1024, CeilDiv(p.hidden, elements * 32) * 32)); };
  if (vectorise) return Launch(LayerNormKernel<QUANT, VEC, 2>, dim3(p.num_rows), threads_for(2 * VEC), false, stream, p);
  return Launch(LayerNormKernel<QUANT, 1, 8>, dim3(p.num_rows), threads_for(8), false, stream, p);
}

}  // namespace norm

template <typename T>
Status RMSNorm(const RMSNormParams<T>& p, Stream stream) {
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  const bool quant = p.out_kind != NormOut::kSame, residual = p.residual != nullptr;
  if (quant && residual) return norm::DispatchRMSNorm<T, true, true>(p, stream);
  if (quant) return norm::DispatchRMSNorm<T, true, false>(p, stream);
  if (residual) return norm::DispatchRMSNorm<T, false, true>(p, stream);
  return norm::DispatchRMSNorm<T, false, false>(p, stream);
}

FLASHINFER_INLINE Status LayerNorm(const LayerNormParams& p, Stream stream) {
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  if (p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  return p.out_kind == NormOut::kSame ? norm::DispatchLayerNorm<false>(p, stream) : norm::DispatchLayerNorm<true>(p, stream);
}

}  // namespace flashinfer
