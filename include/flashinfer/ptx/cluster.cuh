// SPDX-License-Identifier: Apache-2.0
// Clusters of blocks that access each other's shared memory (PTX ISA: "barrier.cluster", "mapa", "st.shared::cluster"),
// SM90 and later. Before SM90 every block is a cluster of one block.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Return the rank of this block in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

/// Return the index of the cluster in a one-dimensional grid.
__device__ __forceinline__ uint32_t ClusterId() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
#else
  return blockIdx.x;
#endif
}

/// Return the number of blocks of this cluster.
__device__ __forceinline__ uint32_t ClusterSize() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

/// Arrive at the cluster barrier, with release order: threads that wait for the barrier see earlier writes of this
/// thread.
__device__ __forceinline__ void ClusterArrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/// Arrive at the cluster barrier without release order: earlier writes of this thread need not be visible, so there is
/// no delay until the writes have finished.
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Arrive as ClusterArrive() does, in warps that do so in different places of the code.
__device__ __forceinline__ void ClusterArriveApart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

/// Wait until all blocks of the cluster have arrived, in warps that do so in different places of the code. A cluster of
/// one block does not wait: ptxas would replace the wait by __syncthreads, which must be one instruction for all threads.
__device__ __forceinline__ void ClusterWaitApart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (ClusterSize() > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// Synchronise all threads of the cluster, or of the block before SM90. Writes before the barrier are visible after it.
__device__ __forceinline__ void ClusterSync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ClusterArrive();
  ClusterWait();
#else
  __syncthreads();
#endif
}

/// Return the address of the shared-memory variable `local` in block `rank` of the cluster, for loads and stores.
template <typename T>
__device__ __forceinline__ T* InBlock(T* local, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(local), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return local;
#endif
}

/// Load 4 or 16 bytes from the shared-memory address `address` of block `rank` of the cluster.
__device__ __forceinline__ float LoadShared4(uint32_t address, [[maybe_unused]] uint32_t rank) {
  float x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#endif
  return x;
}
__device__ __forceinline__ float4 LoadShared16(uint32_t address, [[maybe_unused]] uint32_t rank) {
  float4 x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
#endif
  return x;
}

/// Store `value` to the shared-memory address `local` of block `rank` of the cluster.
__device__ __forceinline__ void StoreShared(uint32_t* local, uint32_t rank, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = uint32_t(__cvta_generic_to_shared(local));
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
#else
  *local = value;
#endif
}

}  // namespace ptx
}  // namespace flashinfer
