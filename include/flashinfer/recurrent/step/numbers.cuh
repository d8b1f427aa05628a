// SPDX-License-Identifier: Apache-2.0
// Loads and stores of elements whose type or alignment is known only when the kernel runs.
#pragma once
#include "../../vec_dtypes.cuh"
#include "../step.h"

namespace flashinfer {
namespace recurrent {
namespace step {

__device__ __forceinline__ float LoadNumber(const void* data, int64_t i, ElementType type) {
  if (type == ElementType::kFloat) return static_cast<const float*>(data)[i];
  if (type == ElementType::kHalf) return ToFloat(static_cast<const __half*>(data)[i]);
  return ToFloat(static_cast<const __nv_bfloat16*>(data)[i]);
}

/// Load the bits of a number; DecodeRaw makes it a float. Loads one after another are all in flight that way: a
/// conversion in each branch of a type would wait for its load.
__device__ __forceinline__ uint32_t LoadRaw(const void* data, int64_t i, ElementType type) {
  return type == ElementType::kFloat ? static_cast<const uint32_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
}

__device__ __forceinline__ float DecodeRaw(uint32_t bits, ElementType type) {
  if (type == ElementType::kFloat) return __uint_as_float(bits);
  if (type == ElementType::kBfloat) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ void StoreNumber(void* data, int64_t i, ElementType type, float x) {
  if (type == ElementType::kFloat) {
    static_cast<float*>(data)[i] = x;
  } else if (type == ElementType::kHalf) {
    static_cast<__half*>(data)[i] = FromFloat<__half>(x);
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = FromFloat<__nv_bfloat16>(x);
  }
}

/// Load N neighbours, at once if `is_vectorised`.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> LoadSome(const T* from, bool is_vectorised) {
  if (is_vectorised) return Vec<T, N>::Load(from);
  Vec<T, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = from[i];
  return x;
}

template <typename T, int N>
__device__ __forceinline__ void StoreSome(T* to, const Vec<T, N>& x, bool is_vectorised) {
  if (is_vectorised) return x.Store(to);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = x[i];
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
