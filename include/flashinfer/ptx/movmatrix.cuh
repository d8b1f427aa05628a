// SPDX-License-Identifier: Apache-2.0
// Transposition of an 8 x 8 matrix of 16-bit elements inside a warp (PTX ISA: Warp-Level Matrix Instructions,
// "movmatrix"), SM75 and later. Lane l has elements (l / 4, 2 (l % 4)) and its right neighbour, as in the fragments of
// mma and wgmma, before and after.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace ptx
}  // namespace flashinfer
