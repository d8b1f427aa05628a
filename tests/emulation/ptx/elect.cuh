// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/elect.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline bool ElectLane() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

}  // namespace ptx
}  // namespace flashinfer
