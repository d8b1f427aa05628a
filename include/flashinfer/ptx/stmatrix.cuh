// SPDX-License-Identifier: Apache-2.0
// 8 x 8 matrices of 16-bit elements from the fragments of mma and wgmma to shared memory (PTX ISA: Warp-Level Matrix
// Instructions, "stmatrix"), SM90 and later. Lane l has elements (l / 4, 2 (l % 4)) and its right neighbour of each matrix
// in one register; lane 8 i + r gives the address of row r (16 bytes) of matrix i. The transposed form stores element
// (r, c) in row c.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void StoreMatrix4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void StoreMatrix2(uint32_t row, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void StoreMatrix2Transposed(uint32_t row, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}

#endif

}  // namespace ptx
}  // namespace flashinfer
