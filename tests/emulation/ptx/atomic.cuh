// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/atomic.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline int32_t AddOrdered(int32_t* address, int32_t x) {
  const int32_t before = *address;
  *address = int32_t(uint32_t(before) + uint32_t(x));  // wraps, as on the device
  return before;
}
/// Other threads run before the load: it may be one of a loop that waits for them.
inline int32_t LoadAcquire(const int32_t* address) {
  emulation::Yield();
  return *address;
}
inline void StoreRelease(int32_t* address, int32_t x) { *address = x; }

}  // namespace ptx
}  // namespace flashinfer
