// SPDX-License-Identifier: Apache-2.0
// RMSNorm and LayerNorm over the last dimension: parameters and entries, shared by both backends.
//   rmsnorm    y = x * rsqrt(mean(x^2) + eps) * (weight_bias + w)      then silu if asked, then out
//   layernorm  y = (x - mean) * rsqrt(var + eps) * gamma + beta
// Defined in norm.cuh and layernorm.cuh (CUDA), norm_cpu.h (CPU). All arithmetic is fp32 with one rounding at the end.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include <type_traits>

#include "backend.h"

namespace flashinfer {

/// Storage of the result. The fp8 kinds multiply by 1 / *scale, saturate and round to nearest even.
enum class NormOut : int { kSame, kE4M3, kE5M2 };

/// Offset of row r, in elements: (r / heads) * batch + (r % heads) * head.
struct RowStride {
  int64_t batch;
  int64_t head;
};

template <typename T>
struct RMSNormParams {
  const T* input;
  T* residual;  ///< null, or x = input + residual is normalised and written back here, rounded once
  const T* weight;
  void* out;           ///< T, or fp8 as out_kind says; may alias input
  const float* scale;  ///< one element, read by the fp8 kinds; null means 1
  int64_t num_rows;    ///< batch * heads
  int64_t heads;
  int64_t hidden;
  RowStride input_stride;
  RowStride residual_stride;
  RowStride out_stride;
  float eps;
  float weight_bias;  ///< 0, or 1 for the Gemma form
  NormOut out_kind;
  bool silu;        ///< y <- y * sigmoid(y) before the output conversion
  bool enable_pdl;  ///< CUDA only: programmatic dependent launch
};

template <typename T>
Status RMSNorm(const RMSNormParams<T>& params, Stream stream);

#ifndef FLASHINFER_CPU
/// Options of a norm kernel besides normalising; each combination is a set of kernels and a compilation unit.
template <bool QUANT_, bool RESIDUAL_, bool SILU_>
struct NormForm {
  static constexpr bool QUANT = QUANT_, RESIDUAL = RESIDUAL_, SILU = SILU_;
};

/// RMSNorm of one form. Defined in norm.cuh; the launcher needs the declaration only.
template <typename T, typename F>
Status RMSNormOf(const RMSNormParams<T>& params, Stream stream);

template <typename T>
Status RMSNorm(const RMSNormParams<T>& p, Stream stream) {
  const bool quant = p.out_kind != NormOut::kSame;
  if (p.silu) {
    if constexpr (std::is_same_v<T, bfloat16_t>) {  // the only element type that has it
      return quant ? RMSNormOf<T, NormForm<true, false, true>>(p, stream)
                   : RMSNormOf<T, NormForm<false, false, true>>(p, stream);
    }
    return cudaErrorNotSupported;
  }
  if (p.residual != nullptr) {
    return quant ? RMSNormOf<T, NormForm<true, true, false>>(p, stream)
                 : RMSNormOf<T, NormForm<false, true, false>>(p, stream);
  }
  return quant ? RMSNormOf<T, NormForm<true, false, false>>(p, stream)
               : RMSNormOf<T, NormForm<false, false, false>>(p, stream);
}
#endif

struct LayerNormParams {
  const bfloat16_t* input;
  const float* gamma;
  const float* beta;
  void* out;  ///< bfloat16, or fp8 of the bfloat16-rounded result
  const float* scale;
  int64_t num_rows;
  int64_t hidden;
  int64_t input_stride;
  int64_t out_stride;
  float eps;
  NormOut out_kind;
};

Status LayerNorm(const LayerNormParams& params, Stream stream);

}  // namespace flashinfer
