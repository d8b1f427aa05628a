// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/stmatrix.cuh.
#pragma once
#include "matrices.cuh"

namespace flashinfer {
namespace ptx {

inline void StoreMatrix4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  StoreMatrices<4>(row, {a, b, c, d}, false);
}
inline void StoreMatrix2(uint32_t row, uint32_t a, uint32_t b) { StoreMatrices<2>(row, {a, b}, false); }
inline void StoreMatrix4Transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  StoreMatrices<4>(row, {a, b, c, d}, true);
}
inline void StoreMatrix2Transposed(uint32_t row, uint32_t a, uint32_t b) { StoreMatrices<2>(row, {a, b}, true); }

}  // namespace ptx
}  // namespace flashinfer
