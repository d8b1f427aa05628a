// SPDX-License-Identifier: Apache-2.0
// Size of a block's shared memory (PTX ISA: Special Registers, "%dynamic_smem_size").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Bytes of it that the launch asked for.
__device__ __forceinline__ uint32_t DynamicSharedBytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace ptx
}  // namespace flashinfer
