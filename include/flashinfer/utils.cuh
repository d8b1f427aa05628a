// SPDX-License-Identifier: Apache-2.0
// Helpers of all kernel headers: block reductions, launching, integer arithmetic.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "backend.h"
#include "host_device.h"

// Entries that are not templates: inline for whoever includes a kernel header; a unit that other units link against
// defines this empty before including it.
#ifndef FLASHINFER_INLINE
#define FLASHINFER_INLINE inline
#endif

namespace flashinfer {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Return the smallest power of two that is >= x.
constexpr int NextPowerOfTwo(int x) {
  int p = 1;
  while (p < x) p *= 2;
  return p;
}

/// Return the threads of a block that covers `hidden` with `elements` per thread, in whole warps.
inline int BlockThreads(int64_t hidden, int elements) {
  return int(std::min<int64_t>(1024, CeilDiv(hidden, int64_t(elements) * 32) * 32));
}

inline bool IsAligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

/// Return the sum over groups of `width` neighbouring lanes (a power of two), in every lane.
__device__ __forceinline__ float GroupSum(float x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// Return the sum over the block, with one barrier: each warp writes one number and every warp adds all of them, in the
/// same order. `scratch` holds 32 floats; a second reduction needs another scratch.
__device__ __forceinline__ float BlockSum(float x, float* scratch) {
  x = GroupSum(x, 32);
  const int lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return GroupSum(lane * 32 < int(blockDim.x) ? scratch[lane] : 0.f, 32);  // no loop: its code takes longer to fetch
}

constexpr int MAX_CLUSTER = 8;  // blocks per cluster that every device with clusters supports

/// Launch configuration: optional programmatic dependent launch, cluster size.
struct LaunchConfig {
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};

  LaunchConfig(dim3 grid, dim3 block, size_t shared_bytes, bool enable_pdl, cudaStream_t stream, int cluster = 1) {
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {unsigned(cluster), 1, 1};
    }
    if (enable_pdl) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;  // members point to other members

  /// Start all blocks at once or none: for grids whose blocks wait for each other.
  void SetCooperative() {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }

  template <typename... Params, typename... Args>
  cudaError_t Launch(void (*kernel)(Params...), Args&&... args) const {
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
};

/// Launch with `shared_bytes` of dynamic shared memory, with or without programmatic dependent launch.
template <typename... Params, typename... Args>
cudaError_t LaunchShared(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, bool enable_pdl,
                         cudaStream_t stream, Args&&... args) {
  return LaunchConfig(grid, block, shared_bytes, enable_pdl, stream).Launch(kernel, args...);
}

template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, dim3 block, bool enable_pdl, cudaStream_t stream,
                   Args&&... args) {
  return LaunchShared(kernel, grid, block, 0, enable_pdl, stream, args...);
}

}  // namespace flashinfer
