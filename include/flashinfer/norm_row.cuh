// SPDX-License-Identifier: Apache-2.0
// Helpers of the RMSNorm kernels: arithmetic of a vector, address of a row (formulas: norm.h).
#pragma once
#include "norm.h"
#include "ptx/prefetch.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

/// Return the values of a vector as fp32, with the residual added.
template <typename F, typename T, int VEC>
__device__ __forceinline__ void Values(const Vec<T, VEC>& x, const Vec<T, VEC>& add, float (&s)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) s[i] = F::RESIDUAL ? x.Float(i) + add.Float(i) : x.Float(i);
}

template <int VEC>
__device__ __forceinline__ float SumOfSquares(const float (&s)[VEC]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum += s[i] * s[i];
  return sum;
}

template <typename F, typename T, int VEC>
__device__ __forceinline__ float SumOfSquares(const Vec<T, VEC>& x, const Vec<T, VEC>& add) {
  float s[VEC];
  Values<F>(x, add, s);
  return SumOfSquares(s);
}

template <typename F>
__device__ __forceinline__ float InverseScale(const float* scale) {
  return F::QUANT && scale != nullptr ? 1.f / *scale : 1.f;
}

/// Element type of the output.
template <typename T, typename F>
using OutOf = std::conditional_t<F::QUANT, uint8_t, T>;

/// Compute one vector of the result from its values.
template <typename F, typename T, int VEC>
__device__ __forceinline__ void Normalise(float (&s)[VEC], float rstd, const Vec<T, VEC>& weight, float weight_bias,
                                          float inv_scale) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    s[i] = s[i] * rstd * (weight_bias + weight.Float(i));
    if constexpr (F::SILU) s[i] = s[i] / (1.f + __expf(-s[i]));
    if constexpr (F::QUANT) s[i] *= inv_scale;
  }
}

template <typename F, typename T, int VEC>
__device__ __forceinline__ void StoreVector(OutOf<T, F>* out, const float (&s)[VEC], NormOut kind) {
  if constexpr (F::QUANT) {
    StoreFp8<VEC>(out, s, kind == NormOut::kE4M3 ? __NV_E4M3 : __NV_E5M2);
  } else {
    RoundTo<T, VEC>(s).Store(out);
  }
}

/// Strides of rows and heads in elements. 32 bits if rows consist of vectors: an offset is then one instruction.
template <typename Int>
struct Stride {
  Int batch, head;
  __device__ __forceinline__ int64_t Offset(uint32_t row, uint32_t index) const {
    return int64_t(Int(row)) * batch + int64_t(Int(index)) * head;
  }
};

/// RMSNormParams in the form that kernels read. Members that are read first come first.
template <typename T, typename Int>
struct RowArgs {
  const T* input;
  const T* weight;
  Stride<Int> input_stride;
  int hidden;
  uint32_t batch;  // rows of one head
  uint32_t ahead;  // prefetch distance in rows
  float inv_hidden, eps, weight_bias;
  void* out;
  T* residual;
  Stride<Int> out_stride, residual_stride;
  const float* scale;
  NormOut out_kind;
};

/// One row: its address, and the store of a vector of the result.
template <typename T, typename F, int VEC, typename Int>
struct Row {
  using V = Vec<T, VEC>;
  using Out = OutOf<T, F>;
  const RowArgs<T, Int>& a;
  const T* input;
  T* residual;
  Out* out;

  __device__ __forceinline__ Row(const RowArgs<T, Int>& args, uint32_t row, uint32_t head)
      : a(args),
        input(a.input + a.input_stride.Offset(row, head)),
        residual(F::RESIDUAL ? a.residual + a.residual_stride.Offset(row, head) : nullptr),
        out(static_cast<Out*>(a.out) + a.out_stride.Offset(row, head)) {}

  /// Prefetch `rows` rows, starting a.ahead after this row, into L2, if there are so many. Several rows must be
  /// contiguous.
  __device__ __forceinline__ void PrefetchAhead(uint32_t row, uint32_t rows) const {
    if (a.ahead + rows > a.batch - min(row, a.batch)) return;
    const uint32_t bytes = rows * a.hidden * sizeof(T);
    ptx::PrefetchL2(input + a.input_stride.Offset(a.ahead, 0), bytes);
    if constexpr (F::RESIDUAL) ptx::PrefetchL2(residual + a.residual_stride.Offset(a.ahead, 0), bytes);
  }

  /// Write one vector of the sum; `s` holds the values before normalisation.
  __device__ __forceinline__ void StoreResidual(int64_t column, const float (&s)[VEC]) const {
    if constexpr (F::RESIDUAL) RoundTo<T, VEC>(s).Store(residual + column);
  }

  /// Write one vector of the result.
  __device__ __forceinline__ void Store(int64_t column, float (&s)[VEC], float rstd, const V& weight,
                                        float inv_scale) const {
    Normalise<F>(s, rstd, weight, a.weight_bias, inv_scale);
    StoreVector<F, T>(out + column, s, a.out_kind);
  }
};

/// Return the index of this block within its head, for a grid (heads, y, z). The grid may have a few excess blocks.
__device__ __forceinline__ uint32_t BlockOfHead() { return blockIdx.z * gridDim.y + blockIdx.y; }

}  // namespace norm
}  // namespace flashinfer
