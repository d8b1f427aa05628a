// SPDX-License-Identifier: Apache-2.0
// Points that the compiler does not move computations across. No instruction is emitted.
#pragma once

namespace flashinfer {
namespace ptx {

/// Keep the compiler from computing with `x` before this point, which stays behind the asm statements before it.
__device__ __forceinline__ void Pin(int& x) { asm volatile("" : "+r"(x)::"memory"); }

}  // namespace ptx
}  // namespace flashinfer
