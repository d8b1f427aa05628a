// SPDX-License-Identifier: Apache-2.0
// The clock of the GPU (PTX ISA: special register "%globaltimer").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return the time in nanoseconds. The register advances in steps of 32 ns to about 1 us, depending on GPU and driver.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

}  // namespace ptx
}  // namespace flashinfer
