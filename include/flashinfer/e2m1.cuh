// SPDX-License-Identifier: Apache-2.0
// Rounding to four-bit floats (e2m1) on CUDA, without the instructions of Blackwell.
//   test  pytest tests/page/test_page_nvfp4.py tests/comm/test_emulated_allreduce.py
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer {

/// Round to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code.
__device__ __forceinline__ uint32_t RoundToE2M1(float magnitude) {
  const float x = fminf(magnitude, 6.f);
  const uint32_t bits = __float_as_uint(x);
  const uint32_t normal = ((bits + ((bits >> 22) & 1) + 0x1FFFFF) >> 22) - 252;  // keeps one mantissa bit
  const uint32_t small = __float_as_uint(x + 4194304.f) - 0x4A800000;  // adds 2^22, whose last mantissa bit is one half
  return x < 1.f ? small : normal;
}

}  // namespace flashinfer
