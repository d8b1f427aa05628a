// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/pin.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void Pin(int&) {}

}  // namespace ptx
}  // namespace flashinfer
