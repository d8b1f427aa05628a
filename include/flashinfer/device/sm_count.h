// SPDX-License-Identifier: Apache-2.0
// Number of SMs of a device, for launchers that choose tiles.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>

namespace flashinfer {
namespace device {

constexpr int MAX_DEVICES = 64;  // devices whose properties are remembered

/// Return the number of SMs of a device, queried once.
inline int SmCount(int device) {
  static std::atomic<int> counts[MAX_DEVICES];
  int count = device < MAX_DEVICES ? counts[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < MAX_DEVICES) counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace device
}  // namespace flashinfer
