// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/globaltimer.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint64_t GlobalTimer() {
  static uint64_t ns = 0;
  return ns += 32;
}

}  // namespace ptx
}  // namespace flashinfer
