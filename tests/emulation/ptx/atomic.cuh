// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/atomic.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline int32_t AddOrdered(int32_t* address, int32_t x) {
  const int32_t before = *address;
  *address += x;
  return before;
}

}  // namespace ptx
}  // namespace flashinfer
