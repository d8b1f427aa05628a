// SPDX-License-Identifier: Apache-2.0
// Chunked delta rules on SM90: launch of a pass of the second kernel.
#pragma once
#include "../../device/occupancy.cuh"
#include "kernel.cuh"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

template <typename T, typename S, Pass PASS>
cudaError_t LaunchScan(const DeltaParams<T>& p, const Maps& maps, int64_t items, cudaStream_t stream) {
  constexpr auto KERNEL = ScanChunksSm90Kernel<T, S, PASS>;
  const cudaError_t allowed = device::AllowShared<KERNEL, S::BYTES>();
  if (allowed != cudaSuccess) return allowed;
  const int blocks = PASS == Pass::kTransfer ? 2 : 2 / S::WARPGROUPS;  // blocks of a head
  const dim3 grid(unsigned(items) * p.num_heads * blocks);
  return LaunchShared(KERNEL, grid, dim3(S::THREADS), S::BYTES, p.enable_pdl, stream, p, maps);
}

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
