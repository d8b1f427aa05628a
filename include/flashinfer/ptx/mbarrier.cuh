// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes (PTX ISA: Parallel Synchronization, "mbarrier"), SM90 and later.
// A barrier is 8 bytes, aligned to 8, given by its address in shared memory. Its phases alternate between parity 0 and 1:
// one that was just initialised is in phase 0, so waiting for parity 1 returns at once.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return the 32-bit address in shared memory that the functions here take.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Initialise a barrier whose phases end after `arrivals` arrivals and all expected bytes. By one thread.
__device__ __forceinline__ void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Show initialised barriers to the copy engine and the cluster. By the thread that initialised them, before the barrier
/// of the block or cluster that publishes them.
__device__ __forceinline__ void MbarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrive, and let the phase wait for `bytes` more from the copy engine. At most 2^20 - 1 bytes a phase.
__device__ __forceinline__ void MbarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Arrive at the barrier that has this address in block `rank` of the cluster, the own block included.
__device__ __forceinline__ void MbarrierArriveCluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Return whether the phase of this parity has ended; waits for a time that the hardware chooses.
__device__ __forceinline__ bool MbarrierTryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Wait until the phase of this parity has ended, and see what was written before those arrivals.
__device__ __forceinline__ void MbarrierWait(uint32_t barrier, uint32_t parity) {
  while (!MbarrierTryWait(barrier, parity)) {
  }
}

/// The same for arrivals from the whole cluster: acquires at that scope.
__device__ __forceinline__ void MbarrierWaitCluster(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

#endif

}  // namespace ptx
}  // namespace flashinfer
