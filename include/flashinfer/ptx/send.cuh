// SPDX-License-Identifier: Apache-2.0
// Words sent to blocks of a cluster (PTX ISA: "st.async", "mbarrier"), SM90 and later: whoever waits for them sees
// them without any fence or barrier of the cluster. Within a cluster of one, words are stored and waiting is a barrier
// of the block: all its threads wait.
#pragma once
#include "cluster.cuh"

namespace flashinfer {
namespace ptx {

/// `barrier`, in shared memory, is for so many bytes. By one thread, before it arrives at the barrier of the
/// cluster that all senders wait for. (compute-sanitizer's racecheck warns of the two accesses, which are in order.)
__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// The same once more, by one thread that has waited for those before.
__device__ __forceinline__ void ExpectMoreBytes(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() == 1) return;  // there was nothing to be told of
  const uint32_t address = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}

/// Wait for all of them, and see these words. Not what senders wrote otherwise: acquiring that from the cluster would
/// empty the L1 cache. `turn`: how often bytes were waited for before.
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

/// Store to where `local` is in block `rank`, whose `barrier` is told.
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
