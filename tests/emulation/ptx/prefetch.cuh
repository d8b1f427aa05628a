// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/prefetch.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void PrefetchL2(const void*) {}
inline void PrefetchL2(const void* address, uint32_t bytes) {
  emulation::Require(reinterpret_cast<uintptr_t>(address) % 16 == 0 && bytes % 16 == 0,
                     "PrefetchL2: units of 16 bytes");
}

}  // namespace ptx
}  // namespace flashinfer
