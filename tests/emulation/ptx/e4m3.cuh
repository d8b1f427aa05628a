// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/e4m3.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint16_t E4m3Pair(float a, float b) { return __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, __NV_E4M3); }
inline uint32_t E4m3Pairs(float a, float b, uint16_t high) { return uint32_t(high) << 16 | E4m3Pair(a, b); }
inline int Max3(int a, int b, int c) { return std::max(a, std::max(b, c)); }

}  // namespace ptx
}  // namespace flashinfer
