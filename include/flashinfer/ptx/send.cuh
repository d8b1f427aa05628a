// SPDX-License-Identifier: Apache-2.0
// Words sent to blocks of a cluster (PTX ISA: "st.async", "mbarrier"), SM90 and later. A thread that waits for the
// words sees the words without a fence or a cluster barrier. In a cluster of one block, sending is an ordinary store
// and waiting is a barrier of the block: all threads of the block must wait.
#pragma once
#include "cluster.cuh"

namespace flashinfer {
namespace ptx {

/// Initialise `barrier`, in shared memory, to wait for `bytes` bytes. Called by all threads of the block; the first one
/// does it, before that thread arrives at the cluster barrier that all senders wait for.
__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = uint32_t(__cvta_generic_to_shared(barrier));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
#ifdef FLASHINFER_RACECHECK
  __syncthreads();  // racecheck takes both instructions of this thread for accesses of two threads
#endif
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
}

/// Expect `bytes` bytes in the next phase of `barrier`. Called by one thread that has waited for the previous phase.
__device__ __forceinline__ void ExpectMoreBytes(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() == 1) return;  // a cluster of one block does not use the mbarrier
  const uint32_t address = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}

/// Wait for all expected bytes. Only the words sent are visible afterwards, not other writes of the senders: an acquire
/// at cluster scope would invalidate the L1 cache. `turn`: number of earlier waits for this barrier.
__device__ __forceinline__ void WaitForBytes(uint64_t* barrier, uint32_t turn = 0) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() == 1) {
    __syncthreads();
    return;
  }
  const uint32_t address = uint32_t(__cvta_generic_to_shared(barrier));
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(turn % 2)
        : "memory");
  }
#else
  __syncthreads();
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t SharedInBlock(const void* local, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(uint32_t(__cvta_generic_to_shared(local))), "r"(rank));
  return remote;
}
#endif

/// Store `word` to the shared-memory address `local` of block `rank`, and signal `barrier` of that block.
__device__ __forceinline__ void Send(uint32_t* local, uint32_t rank, uint32_t word, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() == 1) {
    *local = word;
    return;
  }
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   SharedInBlock(local, rank)),
               "r"(word), "r"(SharedInBlock(barrier, rank))
               : "memory");
#else
  *local = word;
#endif
}

__device__ __forceinline__ void Send(uint4* local, uint32_t rank, const uint4& words, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() == 1) {
    *local = words;
    return;
  }
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   SharedInBlock(local, rank)),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(SharedInBlock(barrier, rank))
               : "memory");
#else
  *local = words;
#endif
}

}  // namespace ptx
}  // namespace flashinfer
