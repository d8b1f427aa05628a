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

}  // namespace ptx
}  // namespace flashinfer
