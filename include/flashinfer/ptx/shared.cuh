// SPDX-License-Identifier: Apache-2.0
// A block's shared memory: its size (PTX ISA: Special Registers, "%dynamic_smem_size") and addresses in it.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return the 32-bit address in shared memory that instructions take.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

/// Return the bytes of dynamic shared memory that the launch requested.
__device__ __forceinline__ uint32_t DynamicSharedBytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace ptx
}  // namespace flashinfer
