// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule for any GPU from SM80 on: both launches.
#pragma once
#include "normalize.cuh"
#include "scan.cuh"

namespace flashinfer {
namespace recurrent {

/// Run both kernels. One stage is 82 KB, for devices with 99 KB of shared memory; two stages are 148 KB.
template <typename T>
Status GdnPrefill(const DeltaParams<T>& p, Stream stream) {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const Status status = PrepareChunks(p, stream);
  if (status != cudaSuccess) return status;
  return bytes >= 2 * SCAN_STAGE_BYTES + 2 * SLAB_BYTES ? LaunchScan<T, 2>(p, stream) : LaunchScan<T, 1>(p, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
