// SPDX-License-Identifier: Apache-2.0
// Pairs of 16-bit numbers in a register, and rows of states of any type, from and to registers.
//
// A warp has 16 rows of a state as it has rows of an accumulator (ptx/mma.cuh): lane l has, in registers 4 j, 4 j + 1, row
// l / 4, columns 8 j + 2 (l % 4) + {0, 1}, and in 4 j + 2, 4 j + 3 the same columns eight rows below.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "params.h"

namespace flashinfer {
namespace recurrent {

template <typename T>
__device__ __forceinline__ uint32_t PackPair(float low, float high);
template <>
__device__ __forceinline__ uint32_t PackPair<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ __forceinline__ float2 UnpackPair(uint32_t x);
template <>
__device__ __forceinline__ float2 UnpackPair<__half>(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
template <>
__device__ __forceinline__ float2 UnpackPair<__nv_bfloat16>(uint32_t x) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}

/// Call f(a value of the type of the states).
template <typename F>
__device__ __forceinline__ void WithStateType(StateType type, const F& f) {
  switch (type) {
    case StateType::kF32:
      return f(float{});
    case StateType::kBf16:
      return f(__nv_bfloat16{});
    case StateType::kF16:
      return f(__half{});
    case StateType::kE4M3:
      return f(__nv_fp8_e4m3{});
    case StateType::kE5M2:
      return f(__nv_fp8_e5m2{});
  }
}

/// Load rows [row, row + 16) of the state in `slot` and `head`; zeros without states.
__device__ __forceinline__ void LoadState(float (&s)[DIM / 2], const States& states, int64_t slot, int head, int row) {
#pragma unroll
  for (int i = 0; i < DIM / 2; ++i) s[i] = 0.f;
  if (states.data == nullptr) return;
  const int lane = threadIdx.x % 32;
  const int64_t at = slot * states.slot + head * states.head + (row + lane / 4) * states.v + 2 * (lane % 4) * states.k;
  WithStateType(states.type, [&](auto zero) {
    using Type = decltype(zero);
    const Type* const from = static_cast<const Type*>(states.data) + at;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) {
      s[i] = float(from[i / 2 % 2 * 8 * states.v + (i / 4 * 8 + i % 2) * states.k]);
    }
  });
}

/// Store rows [row, row + 16) of the state in `slot` and `head`.
__device__ __forceinline__ void StoreState(const float (&s)[DIM / 2], const States& states, int64_t slot, int head,
                                           int row) {
  const int lane = threadIdx.x % 32;
  const int64_t at = slot * states.slot + head * states.head + (row + lane / 4) * states.v + 2 * (lane % 4) * states.k;
  if (states.type == StateType::kF32 && states.k == 1 && states.v % 2 == 0 && states.head % 2 == 0 &&
      states.slot % 2 == 0 && reinterpret_cast<uintptr_t>(states.data) % 8 == 0) {
    float* const to = static_cast<float*>(states.data) + at;
#pragma unroll
    for (int i = 0; i < DIM / 2; i += 2) {
      *reinterpret_cast<float2*>(to + i / 2 % 2 * 8 * states.v + i / 4 * 8) = {s[i], s[i + 1]};
    }
    return;
  }
  WithStateType(states.type, [&](auto zero) {
    using Type = decltype(zero);
    Type* const to = static_cast<Type*>(states.data) + at;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) to[i / 2 % 2 * 8 * states.v + (i / 4 * 8 + i % 2) * states.k] = Type(s[i]);
  });
}

}  // namespace recurrent
}  // namespace flashinfer
