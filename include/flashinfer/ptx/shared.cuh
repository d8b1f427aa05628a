// SPDX-License-Identifier: Apache-2.0
// Size of a block's shared memory (PTX ISA: Special Registers, "%dynamic_smem_size").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return the bytes of dynamic shared memory that the launch requested.
__device__ __forceinline__ uint32_t DynamicSharedBytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace ptx
}  // namespace flashinfer
