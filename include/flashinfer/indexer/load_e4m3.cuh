// SPDX-License-Identifier: Apache-2.0
// Loads of e4m3 numbers for products of half on CUDA, which index scores over pages and over ragged keys share.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace flashinfer {
namespace indexer {

/// Convert four e4m3 numbers to two pairs of halves.
__device__ __forceinline__ void Halves(uint32_t x, uint32_t& low, uint32_t& high) {
  const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(x & 0xffff), __NV_E4M3);
  const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(x >> 16), __NV_E4M3);
  low = uint32_t(a.x) | uint32_t(a.y) << 16;
  high = uint32_t(b.x) | uint32_t(b.y) << 16;
}

/// Bytes [at, at + 8) of a key or a head; zeros if it does not exist. Rows are aligned to 4 bytes or to 1.
template <bool ALIGNED>
__device__ __forceinline__ uint2 LoadBytes(const uint8_t* from, bool exists) {
  uint2 x = {0u, 0u};
  if (!exists) return x;
  if constexpr (ALIGNED) {
    x = *reinterpret_cast<const uint2*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x |= uint32_t(from[i]) << 8 * i, x.y |= uint32_t(from[i + 4]) << 8 * i;
  }
  return x;
}

}  // namespace indexer
}  // namespace flashinfer
