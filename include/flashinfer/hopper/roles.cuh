// SPDX-License-Identifier: Apache-2.0
// The frame of a kernel of one producer warpgroup and consumer warpgroups on SM90: memory, barriers, roles.
//
//   threads 0 .. 127      producer      releases registers, fills the stages of a ring (ring.cuh)
//   threads 128 .. 255    consumer 0    takes registers, multiplies
//   threads 256 .. 383    consumer 1    ...
//
// A kernel names its barriers of some warps in an `enum class NamedBarrier`; 0 is that of __syncthreads.
//   test  pytest tests/hopper/test_emulated_gemm.py tests/mla/test_emulated_mla.py
#pragma once
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/shared.cuh"
#include "smem_tile.cuh"

namespace flashinfer {
namespace hopper {

constexpr int WARPGROUP = 128;            // threads
constexpr int MAX_SHARED_BYTES = 232448;  // dynamic shared memory of a block

/// Dynamic shared memory from its first multiple of SLAB_ALIGNMENT on. A kernel asks for as many bytes more.
struct AlignedMemory {
  uint32_t base;        // address of shared memory
  unsigned char* data;  // the same place as a pointer
};

__device__ __forceinline__ AlignedMemory Aligned(void* raw) {
  const uint32_t address = ptx::SharedAddress(raw);
  const uint32_t base = (address + SLAB_ALIGNMENT - 1) / SLAB_ALIGNMENT * SLAB_ALIGNMENT;
  return {base, static_cast<unsigned char*>(raw) + (base - address)};
}

/// Call produce() in the producer warpgroup and consume(number of the warpgroup) in the others, with so many registers per
/// thread; 0: as many as the launch gave to all. The two calls are the sides of one branch, as setmaxnreg wants it.
template <int PRODUCER_REGISTERS, int CONSUMER_REGISTERS, typename Produce, typename Consume>
__device__ __forceinline__ void RunRoles(const Produce& produce, const Consume& consume) {
  const int role = __shfl_sync(~0u, int(threadIdx.x) / WARPGROUP, 0);
  if (role == 0) {
    if constexpr (PRODUCER_REGISTERS > 0) ptx::ReleaseRegisters<PRODUCER_REGISTERS>();
    produce();
  } else {
    if constexpr (CONSUMER_REGISTERS > 0) ptx::TakeRegisters<CONSUMER_REGISTERS>();
    consume(role - 1);
  }
}

}  // namespace hopper
}  // namespace flashinfer
