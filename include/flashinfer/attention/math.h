// SPDX-License-Identifier: Apache-2.0
// Functions that attention variants may call, on either side. Names are those of published variants.
#pragma once
#include <cmath>
#include <limits>

#include "../host_device.h"
#ifdef __CUDACC__
#include "../ptx/math.cuh"
#endif

namespace flashinfer {
namespace math {

constexpr float log2e = 1.44269504088896340736f;
constexpr float loge2 = 0.693147180559945309417f;
constexpr float inf = std::numeric_limits<float>::infinity();

/// 2^x. On the device one instruction: 2 ulp, results below 2^-126 are 0.
FLASHINFER_HD float ptx_exp2(float x) {
#ifdef __CUDA_ARCH__
  return ptx::Exp2(x);
#else
  return std::exp2(x);
#endif
}

FLASHINFER_HD float ptx_log2(float x) {
#ifdef __CUDA_ARCH__
  return __log2f(x);
#else
  return std::log2(x);
#endif
}

FLASHINFER_HD float ptx_rcp(float x) {
#ifdef __CUDA_ARCH__
  return ptx::Reciprocal(x);
#else
  return 1.f / x;
#endif
}

/// tanh, on the device to 2^-11: below the rounding of 16-bit logits.
FLASHINFER_HD float tanh(float x) {
#ifdef __CUDA_ARCH__
  return ptx::Tanh(x);
#else
  return std::tanh(x);
#endif
}

}  // namespace math
}  // namespace flashinfer
