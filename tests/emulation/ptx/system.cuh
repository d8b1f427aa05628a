// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/system.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

/// Other threads run before the load: it may be one of a loop that waits for them.
inline uint4 LoadSystem(const uint4* address) {
  emulation::Yield();
  return *address;
}
inline uint32_t LoadSystem(const uint32_t* address) {
  emulation::Yield();
  return *address;
}
inline void StoreSystem(uint4* address, const uint4& x) { *address = x; }
inline void StoreSystem(uint32_t* address, uint32_t x) { *address = x; }
inline uint32_t LoadAcquireSystem(const uint32_t* address) { return LoadSystem(address); }
inline void StoreReleaseSystem(uint32_t* address, uint32_t x) { *address = x; }

}  // namespace ptx
}  // namespace flashinfer
