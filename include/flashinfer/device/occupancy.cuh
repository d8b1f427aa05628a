// SPDX-License-Identifier: Apache-2.0
// Occupancy queries and launches of kernels that fill the device, with as much shared memory as a block can have.
#pragma once
#include <atomic>

#include "../utils.cuh"
#include "sm_count.h"

namespace flashinfer {
namespace device {

/// Bytes of shared memory that a block may use on every device the unit is compiled for.
constexpr int SharedLimitOf(int arch) {
  switch (arch) {
    case 900:
    case 1000:
    case 1030:
    case 1100:
      return 227 * 1024;
    case 800:
    case 870:
      return 163 * 1024;
    case 750:
      return 64 * 1024;
    default:
      return 99 * 1024;
  }
}
constexpr int SharedLimit() {
#ifdef __CUDA_ARCH_LIST__
  constexpr int ARCHS[] = {__CUDA_ARCH_LIST__};
#else
  constexpr int ARCHS[] = {800};
#endif
  int limit = 227 * 1024;
  for (int arch : ARCHS) limit = SharedLimitOf(arch) < limit ? SharedLimitOf(arch) : limit;
  return limit;
}

/// Cache a driver query per device.
template <typename Tag>
int OncePerDevice(int (*ask)(int device)) {
  static std::atomic<int> known[MAX_DEVICES];  // 0: unknown, otherwise the answer + 1
  int device = 0;
  cudaGetDevice(&device);
  if (device >= MAX_DEVICES) return ask(device);
  int x = known[device].load(std::memory_order_relaxed);
  if (x == 0) known[device].store(x = ask(device) + 1, std::memory_order_relaxed);
  return x - 1;
}

/// True on SM90 and later, which copy bytes between global and shared memory by themselves (ptx/bulk.cuh).
inline bool HasBulkCopies() {
  struct Tag {};
  return OncePerDevice<Tag>([](int device) {
           int major = 0;
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
           return major;
         }) >= 9;
}

/// Allow KERNEL to use BYTES of dynamic shared memory, once per device.
template <auto KERNEL, int BYTES>
Status AllowShared() {
  static std::atomic<bool> allowed[MAX_DEVICES];
  int device = 0;
  Status status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const bool is_known = device < MAX_DEVICES;
  if (is_known && allowed[device].load(std::memory_order_relaxed)) return cudaSuccess;
  status = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (is_known && status == cudaSuccess) allowed[device].store(true, std::memory_order_relaxed);
  return status;
}

template <auto KERNEL, int THREADS, int BYTES>
int MaxActiveBlocksOf() {
  struct Tag {};
  return OncePerDevice<Tag>([](int device) {
    int each = 0, multiprocessors = 0;
    AllowShared<KERNEL, BYTES>();
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, KERNEL, THREADS, BYTES);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return each * multiprocessors;
  });
}

template <auto KERNEL, int THREADS, int BYTES, typename... Args>
Status LaunchBlocks(int blocks, bool enable_pdl, Stream stream, const Args&... args) {
  const Status status = AllowShared<KERNEL, BYTES>();
  if (status != cudaSuccess) return status;
  return LaunchShared(KERNEL, dim3(blocks), dim3(THREADS), BYTES, enable_pdl, stream, args...);
}

/// Number of clusters of `size` blocks that the current device runs at once, 0 if it has no clusters. An H200 has room for
/// 264 blocks but for 62 clusters of 4, because a cluster must lie within one GPC.
template <auto KERNEL, int THREADS, int BYTES>
int MaxActiveClusters(int size) {
  static std::atomic<int> known[MAX_DEVICES][MAX_CLUSTER + 1];  // 0: unknown, otherwise the answer + 1
  int device = 0;
  if (size < 1 || size > MAX_CLUSTER || cudaGetDevice(&device) != cudaSuccess || device >= MAX_DEVICES) return 0;
  int x = known[device][size].load(std::memory_order_relaxed);
  if (x == 0) {
    AllowShared<KERNEL, BYTES>();
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(size), 1, 1};
    config.gridDim = dim3(size * 128), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = BYTES;
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, KERNEL, &config) != cudaSuccess) {
      cudaGetLastError();  // clear the error: no clusters is a valid answer
      clusters = 0;
    }
    known[device][size].store(x = clusters + 1, std::memory_order_relaxed);
  }
  return x - 1;
}

}  // namespace device
}  // namespace flashinfer
