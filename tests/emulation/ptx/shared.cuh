// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/shared.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint32_t SharedAddress(const void* shared) { return emulation::AddressOf(shared); }
inline uint32_t DynamicSharedBytes() { return emulation::state.dynamic_bytes; }

}  // namespace ptx
}  // namespace flashinfer
