// SPDX-License-Identifier: Apache-2.0
// What include/flashinfer/utils.cuh gives to kernel headers, with launches that run on the CPU: a device of two
// multiprocessors that run one block each.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda_threads.h"
#include "flashinfer/backend.h"
#include "flashinfer/host_device.h"

#define FLASHINFER_INLINE inline

namespace emulation {

inline cudaError_t GetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t GetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
template <typename Kernel>
cudaError_t SetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= SHARED_BYTES ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t MaxActiveBlocks(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

}  // namespace emulation

#define cudaGetDevice emulation::GetDevice
#define cudaDeviceGetAttribute emulation::GetAttribute
#define cudaFuncSetAttribute emulation::SetAttribute
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor emulation::MaxActiveBlocks
#define cudaGetLastError() cudaErrorInvalidValue

namespace flashinfer {

template <typename... Params, typename... Args>
cudaError_t LaunchShared(void (*kernel)(Params...), dim3 grid, dim3 block, size_t, bool, cudaStream_t, Args&&... args) {
  emulation::RunGrid(grid, block, [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace flashinfer
