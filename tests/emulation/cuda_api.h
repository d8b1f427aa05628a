// SPDX-License-Identifier: Apache-2.0
// The functions of the CUDA runtime that launchers call, for an emulated device.
#pragma once
#include "grid.h"

namespace emulation {

/// The device: a test may change it before a launch.
struct Device {
  int multiprocessors = 2;
  int shared_bytes = int(MAX_DYNAMIC);  // shared memory of a block, in bytes
  int blocks_per_multiprocessor = 1;
  int clusters = 1;
};
inline Device device;
inline std::map<const void*, int> allowed_bytes;  // dynamic shared memory of each kernel

/// A device with another number of multiprocessors is another one: launchers keep what they know of each.
inline cudaError_t GetDevice(int* id) { return *id = device.multiprocessors % 32, cudaSuccess; }
inline cudaError_t GetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = device.multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_bytes;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = device.shared_bytes + 1024;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t SetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > device.shared_bytes) return cudaErrorInvalidValue;
  allowed_bytes[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t MaxActiveBlocks(int* blocks, Kernel, int, size_t) {
  return *blocks = device.blocks_per_multiprocessor, cudaSuccess;
}
template <typename Kernel>
cudaError_t MaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t*) {
  return *clusters = device.clusters, cudaSuccess;
}

inline cudaError_t FindDriverFunction(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  if (std::strcmp(name, "cuTensorMapEncodeTiled") != 0) return cudaErrorInvalidValue;
  *function = reinterpret_cast<void*>(&EncodeTiled);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline cudaError_t DriverFunctionByVersion(const char* name, void** function, unsigned, unsigned long long,
                                           cudaDriverEntryPointQueryResult* result) {
  return FindDriverFunction(name, function, result);
}
inline cudaError_t DriverFunction(const char* name, void** function, unsigned long long,
                                  cudaDriverEntryPointQueryResult* result) {
  return FindDriverFunction(name, function, result);
}

template <typename... Params, typename... Args>
cudaError_t LaunchKernel(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  dim3 cluster(1, 1, 1);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& a = config->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) {
      cluster = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
    }
    if (a.id == cudaLaunchAttributeCooperative && a.val.cooperative != 0) cluster = config->gridDim;  // all at once
  }
  if (config->dynamicSmemBytes > size_t(device.shared_bytes)) return cudaErrorInvalidValue;
  if (config->dynamicSmemBytes > 48 * 1024) {
    const auto allowed = allowed_bytes.find(reinterpret_cast<const void*>(kernel));
    if (allowed == allowed_bytes.end() || size_t(allowed->second) < config->dynamicSmemBytes) {
      return LastError() = "more than 48 KB of shared memory without cudaFuncSetAttribute", cudaErrorInvalidValue;
    }
  }
  const bool done = RunGrid(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes,
                            [&] { kernel(static_cast<Params>(args)...); });
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}

inline cudaError_t Memset(void* p, int value, size_t bytes, cudaStream_t) {
  return std::memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t Memcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}

}  // namespace emulation

#define cudaGetDevice emulation::GetDevice
#define cudaDeviceGetAttribute emulation::GetAttribute
#define cudaFuncSetAttribute emulation::SetAttribute
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor emulation::MaxActiveBlocks
#define cudaOccupancyMaxActiveClusters emulation::MaxActiveClusters
#define cudaGetDriverEntryPointByVersion emulation::DriverFunctionByVersion
#define cudaGetDriverEntryPoint emulation::DriverFunction
#define cudaLaunchKernelEx emulation::LaunchKernel
#define cudaMemsetAsync emulation::Memset
#define cudaMemcpyAsync emulation::Memcpy
#define cudaGetLastError() cudaErrorLaunchFailure

extern "C" {
/// The text of the last failure, empty if there was none since the last call.
__attribute__((visibility("default"))) inline const char* emulation_error() {
  static std::string text;
  text.swap(emulation::LastError());
  emulation::LastError().clear();
  return text.c_str();
}
__attribute__((visibility("default"))) inline void emulation_seed(uint64_t seed) {
  emulation::state.random = seed * 2654435761u + 88172645463325252ull;
}
}
// Inline functions are emitted where they are used.
namespace emulation {
__attribute__((used)) static const void* const EXPORTED[] = {reinterpret_cast<const void*>(&emulation_error),
                                                             reinterpret_cast<const void*>(&emulation_seed)};
}
