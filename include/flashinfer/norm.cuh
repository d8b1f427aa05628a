// SPDX-License-Identifier: Apache-2.0
// RMSNorm on CUDA (formulas and parameters: norm.h). Bound by DRAM: each row is read once and written once.
//
// Three RMSNorm kernels, by the length of a row:
//   lanes   up to 2 KB    1 to 32 lanes of a warp hold a row in registers; no shared memory, no barrier
//   block   up to 32 KB   a block holds a row, two 16-byte vectors per thread, one barrier
//   long    beyond, and rows that are not 16-byte aligned: a block per row, which it reads again from L2
//
// H200, bf16, L2 flushed, what was tried for 16384 x 4096 (a device-to-device copy of the size: 67.5 us): two vectors per
// thread and weights fetched after the reduction (32 registers, every thread slot of the SM in use) 70.3 us; four vectors
// 72; one vector 80; a warp per row 77; persistent blocks with the next row prefetched into registers 79, or into
// shared memory by bulk copies 75, whatever the depth. Rows per lane group for 524288 x 128: two 68.5 us, four 71, one 82.
//
// Weights go through L1, which the rows bypass; a prefetch at the start hides their latency without holding registers.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include "norm.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

/// Offset of a row. The host folds heads into rows where the strides allow it, so that most calls multiply only.
__device__ __forceinline__ int64_t RowOffset(uint32_t row, uint32_t heads, RowStride stride) {
  if (heads == 1) return row * stride.batch;
  return row / heads * stride.batch + row % heads * stride.head;
}

/// The rows a thread works on, and how it loads, finishes and stores a vector of them.
template <typename T, typename F, int VEC>
struct Row {
  using V = Vec<T, VEC>;
  const RMSNormParams<T>& p;
  const T* input;
  T* residual;
  int64_t out;

  __device__ __forceinline__ Row(const RMSNormParams<T>& params, uint32_t row)
      : p(params),
        input(p.input + RowOffset(row, p.heads, p.input_stride)),
        residual(F::RESIDUAL ? p.residual + RowOffset(row, p.heads, p.residual_stride) : nullptr),
        out(RowOffset(row, p.heads, p.out_stride)) {}

  /// Write one vector of the result; `s` holds the values before normalisation.
  __device__ __forceinline__ void Finish(int64_t column, float (&s)[VEC], float rstd, const V& weight, float inv_scale) const {
    if constexpr (F::RESIDUAL) RoundTo<T, VEC>(s).Store(residual + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      s[i] = s[i] * rstd * (p.weight_bias + ToFloat(weight[i]));
      if constexpr (F::SILU) s[i] = s[i] / (1.f + __expf(-s[i]));
      if constexpr (F::QUANT) s[i] *= inv_scale;
    }
    if constexpr (F::QUANT) {
      const auto kind = p.out_kind == NormOut::kE4M3 ? __NV_E4M3 : __NV_E5M2;
      RoundToFp8<VEC>(s, kind).Store(static_cast<uint8_t*>(p.out) + out + column);
    } else {
      RoundTo<T, VEC>(s).Store(static_cast<T*>(p.out) + out + column);
    }
  }
};

/// Values of a vector as fp32, the residual added.
template <typename F, typename T, int VEC>
__device__ __forceinline__ void Values(const Vec<T, VEC>& x, const Vec<T, VEC>& add, float (&s)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) s[i] = F::RESIDUAL ? ToFloat(x[i]) + ToFloat(add[i]) : ToFloat(x[i]);
}

template <int VEC>
__device__ __forceinline__ float SumOfSquares(const float (&s)[VEC], float sum) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum += s[i] * s[i];
  return sum;
}

template <typename F>
__device__ __forceinline__ float InverseScale(const float* scale) {
  return F::QUANT && scale != nullptr ? 1.f / *scale : 1.f;
}

/// blockDim.x lanes of a warp hold ROWS rows, NVEC vectors each. The rows of a block interleave: one instruction of a
/// warp covers neighbouring rows.
template <typename T, typename F, int VEC, int NVEC, int ROWS>
__global__ void RMSNormLanesKernel(const __grid_constant__ RMSNormParams<T> p) {
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint64_t once = ptx::EvictFirst();
  const uint32_t first = blockIdx.x * blockDim.y * ROWS + threadIdx.y;
  auto column_of = [&](int v) { return int(threadIdx.x + v * blockDim.x) * VEC; };

  V x[ROWS][NVEC], add[F::RESIDUAL ? ROWS : 1][F::RESIDUAL ? NVEC : 1], w[NVEC];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint32_t index = first + r * blockDim.y;
    const Row<T, F, VEC> row(p, index);
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      const bool inside = index < p.num_rows && column_of(v) < p.hidden;
      x[r][v] = inside ? V::LoadOnce(row.input + column_of(v), once) : V::Zero();
      if constexpr (F::RESIDUAL) add[r][v] = inside ? V::LoadOnce(row.residual + column_of(v), once) : V::Zero();
    }
  }
#pragma unroll
  for (int v = 0; v < NVEC; ++v) w[v] = column_of(v) < p.hidden ? V::Load(p.weight + column_of(v)) : V::Zero();
  const float inv_scale = InverseScale<F>(p.scale);

  float sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = 0.f;
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      float s[VEC];
      Values<F>(x[r][v], add[F::RESIDUAL ? r : 0][F::RESIDUAL ? v : 0], s);
      sum[r] = SumOfSquares(s, sum[r]);
    }
  }
  for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint32_t index = first + r * blockDim.y;
    if (index >= p.num_rows) return;
    const Row<T, F, VEC> row(p, index);
    const float rstd = rsqrtf(sum[r] / float(p.hidden) + p.eps);
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      if (column_of(v) < p.hidden) {
        float s[VEC];
        Values<F>(x[r][v], add[F::RESIDUAL ? r : 0][F::RESIDUAL ? v : 0], s);
        row.Finish(column_of(v), s, rstd, w[v], inv_scale);
      }
    }
  }
}

/// A block holds one row, NVEC vectors per thread.
template <typename T, typename F, int VEC, int NVEC>
__global__ void __launch_bounds__(1024, F::RESIDUAL || F::SILU ? 1 : 2) RMSNormBlockKernel(const __grid_constant__ RMSNormParams<T> p) {
  using V = Vec<T, VEC>;
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint64_t once = ptx::EvictFirst();
  const Row<T, F, VEC> row(p, blockIdx.x);
  auto column_of = [&](int v) { return int(threadIdx.x + v * blockDim.x) * VEC; };

  V x[NVEC], add[F::RESIDUAL ? NVEC : 1];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const bool inside = column_of(v) < p.hidden;
    x[v] = inside ? V::LoadOnce(row.input + column_of(v), once) : V::Zero();
    if constexpr (F::RESIDUAL) add[v] = inside ? V::LoadOnce(row.residual + column_of(v), once) : V::Zero();
  }
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    if (column_of(v) < p.hidden) ptx::PrefetchL1(p.weight + column_of(v));
  }
  const float inv_scale = InverseScale<F>(p.scale);

  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    float s[VEC];
    Values<F>(x[v], add[F::RESIDUAL ? v : 0], s);
    sum = SumOfSquares(s, sum);
  }
  const float rstd = rsqrtf(BlockSum(sum, scratch) / float(p.hidden) + p.eps);
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    if (column_of(v) < p.hidden) {
      float s[VEC];
      Values<F>(x[v], add[F::RESIDUAL ? v : 0], s);
      row.Finish(column_of(v), s, rstd, V::Load(p.weight + column_of(v)), inv_scale);
    }
  }
}

/// A block reads its row twice; any length, any alignment (VEC 1).
template <typename T, typename F, int VEC>
__global__ void __launch_bounds__(1024) RMSNormLongKernel(const __grid_constant__ RMSNormParams<T> p) {
  using V = Vec<T, VEC>;
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Row<T, F, VEC> row(p, blockIdx.x);
  const int64_t begin = threadIdx.x * VEC, step = blockDim.x * VEC;
  const float inv_scale = InverseScale<F>(p.scale);
  auto load = [&](int64_t column, float (&s)[VEC]) {
    Values<F>(V::Load(row.input + column), F::RESIDUAL ? V::Load(row.residual + column) : V::Zero(), s);
  };

  float sum = 0.f, s[VEC];
  for (int64_t column = begin; column < p.hidden; column += step) {
    load(column, s);
    sum = SumOfSquares(s, sum);
  }
  const float rstd = rsqrtf(BlockSum(sum, scratch) / float(p.hidden) + p.eps);
  for (int64_t column = begin; column < p.hidden; column += step) {
    load(column, s);
    row.Finish(column, s, rstd, V::Load(p.weight + column), inv_scale);
  }
}

template <typename T, typename F, int VEC, int NVEC, int ROWS>
cudaError_t LaunchLanes(const RMSNormParams<T>& p, int lanes, cudaStream_t stream) {
  constexpr int THREADS = 128;  // larger blocks wait for their slowest warp, smaller ones run out of block slots
  const int rows = THREADS / lanes * ROWS;
  return Launch(RMSNormLanesKernel<T, F, VEC, NVEC, ROWS>, dim3(CeilDiv(p.num_rows, rows)), dim3(lanes, THREADS / lanes),
                p.enable_pdl, stream, p);
}

template <typename T>
bool CanVectorise(const RMSNormParams<T>& p, int vec) {
  auto strides_divide = [&](RowStride s) { return s.batch % vec == 0 && s.head % vec == 0; };
  const size_t out_bytes = p.out_kind == NormOut::kSame ? 16 : vec;
  return p.hidden % vec == 0 && IsAligned(p.input, 16) && IsAligned(p.weight, 16) && IsAligned(p.out, out_bytes) &&
         strides_divide(p.input_stride) && strides_divide(p.out_stride) &&
         (p.residual == nullptr || (IsAligned(p.residual, 16) && strides_divide(p.residual_stride)));
}

/// Heads that follow each other at the distance of rows are rows.
template <typename T>
RMSNormParams<T> FoldHeads(RMSNormParams<T> p) {
  auto folds = [&](RowStride s) { return s.batch == p.heads * s.head; };
  if (p.heads > 1 && folds(p.input_stride) && folds(p.out_stride) && (p.residual == nullptr || folds(p.residual_stride))) {
    p.input_stride.batch = p.input_stride.head;
    p.out_stride.batch = p.out_stride.head;
    p.residual_stride.batch = p.residual_stride.head;
    p.heads = 1;
  }
  return p;
}

}  // namespace norm

template <typename T, typename F>
Status RMSNormOf(const RMSNormParams<T>& params, Stream stream) {
  using namespace norm;
  if (params.num_rows == 0 || params.hidden == 0) return cudaSuccess;
  if (params.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  const RMSNormParams<T> p = FoldHeads(params);
  constexpr int VEC = 16 / sizeof(T), NVEC = 2;
  const dim3 rows(p.num_rows);
  if (!CanVectorise(p, VEC)) {
    return Launch(RMSNormLongKernel<T, F, 1>, rows, dim3(BlockThreads(p.hidden, 4)), p.enable_pdl, stream, p);
  }
  const int64_t vectors = p.hidden / VEC;
  if (vectors <= 32) return LaunchLanes<T, F, VEC, 1, 2>(p, NextPowerOfTwo(int(vectors)), stream);
  if (vectors <= 64) return LaunchLanes<T, F, VEC, 2, 1>(p, 32, stream);
  if (vectors <= 128) return LaunchLanes<T, F, VEC, 4, 1>(p, 32, stream);
  if (vectors <= 1024 * NVEC) {
    return Launch(RMSNormBlockKernel<T, F, VEC, NVEC>, rows, dim3(BlockThreads(p.hidden, VEC * NVEC)), p.enable_pdl, stream, p);
  }
  return Launch(RMSNormLongKernel<T, F, VEC>, rows, dim3(1024), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
