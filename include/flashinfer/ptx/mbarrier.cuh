// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes (PTX ISA: Parallel Synchronization, "mbarrier"), SM90 and
// later. A barrier is 8 bytes, aligned to 8, and is passed by its address in shared memory. Its phases alternate
// between parity 0 and 1. A newly initialised barrier is in phase 0, so waiting for parity 1 returns at once.
#pragma once
#include <cstdint>

#include "shared.cuh"

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Initialise a barrier whose phases end after `arrivals` arrivals and all expected bytes. Called by one thread.
__device__ __forceinline__ void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Make initialised mbarriers visible to TMA and the cluster. Called by the thread that initialised the mbarriers,
/// before the __syncthreads or cluster barrier after which other threads use them.
__device__ __forceinline__ void MbarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrive, and make the phase wait for `bytes` more from TMA. At most 2^20 - 1 bytes per phase.
__device__ __forceinline__ void MbarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Arrive when the copies that this thread has begun with cp.async have landed.
__device__ __forceinline__ void MbarrierArriveCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Arrive at the barrier with this address in block `rank` of the cluster, which may be the calling block. Orders reads
/// by wgmma that have completed. Ordinary accesses are not ordered: release at cluster scope would cost a MEMBAR, which
/// takes as long as a stage of a GEMM.
__device__ __forceinline__ void MbarrierArriveCluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Return true if the phase of this parity has ended. Waits for at most a time that the hardware chooses.
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

/// Return true if the phase of this parity has ended, without waiting.
__device__ __forceinline__ bool MbarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Wait until the phase of this parity has ended. Writes that preceded the arrivals are visible afterwards.
__device__ __forceinline__ void MbarrierWait(uint32_t barrier, uint32_t parity) {
  while (!MbarrierTryWait(barrier, parity)) {
  }
}

#endif

}  // namespace ptx
}  // namespace flashinfer
