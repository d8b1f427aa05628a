// SPDX-License-Identifier: Apache-2.0
// Functions that attention variants may call, on host and device. The names are those of published variants.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../host_device.h"
#ifdef __CUDACC__
#include "../../ptx/math.cuh"
#endif

namespace flashinfer {
namespace math {

constexpr float log2e = 1.44269504088896340736f;
constexpr float loge2 = 0.693147180559945309417f;
constexpr float inf = std::numeric_limits<float>::infinity();

/// Return 2^x. One instruction on the device: 2 ulp, results below 2^-126 are 0.
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

/// Return tanh(x): on the device to 2^-11, which is below the rounding of 16-bit logits; on the host to 2e-7, without
/// branches or calls so that loops vectorise: (y - 1) / (y + 1) with y = e^2x = 2^n 2^r.
FLASHINFER_HD float tanh(float x) {
#ifdef __CUDA_ARCH__
  return ptx::Tanh(x);
#else
  const float clamped = x < -9.f ? -9.f : (x > 9.f ? 9.f : x), t = clamped * (2.f * log2e);
  const float magic = 12582912.f + 127.f, shifted = t + magic, r = t - (shifted - magic);  // n, biased, in the low bits
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits <<= 23;
  float y, power;
  std::memcpy(&power, &bits, sizeof(power));
  y = 1.3333558e-3f + r * 1.5403530e-4f;  // the series of 2^r, ln(2)^k / k!
  y = 5.5504109e-2f + r * (9.6181291e-3f + r * y);
  y = (1.f + r * (6.9314718e-1f + r * (2.4022651e-1f + r * y))) * power;
  return (y - 1.f) / (y + 1.f);
#endif
}

}  // namespace math
}  // namespace flashinfer
