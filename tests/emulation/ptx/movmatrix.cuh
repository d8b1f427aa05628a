// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/movmatrix.cuh.
#pragma once
#include "matrices.cuh"

namespace flashinfer {
namespace ptx {

inline uint32_t TransposeMatrix(uint32_t x) { return TransposeInWarp(x); }

}  // namespace ptx
}  // namespace flashinfer
