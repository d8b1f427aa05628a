// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PTX ISA: Parallel Synchronization, "griddepcontrol"), SM90 and later; no-ops before.
#pragma once

namespace flashinfer {
namespace ptx {

/// Wait until the grids this one depends on have finished and their writes are visible.
__device__ __forceinline__ void GridDependencyWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Let the next grid of the stream start its prologue.
__device__ __forceinline__ void LaunchDependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Call LaunchDependents only in grids of up to some thousand blocks. In larger grids the signals serialise: an H200
/// handles 0.8 signals per ns, independent of the number of SMs; 81920 blocks that rotate 2 KB each took 102 us instead
/// of 85.
__device__ __forceinline__ void LaunchDependentsOfFew() {
  constexpr unsigned FEW = 8192;
  if (gridDim.x * gridDim.y * gridDim.z <= FEW) LaunchDependents();
}

}  // namespace ptx
}  // namespace flashinfer
