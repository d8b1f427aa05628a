// SPDX-License-Identifier: Apache-2.0
// TMA copies of tensor boxes (PTX ISA: Data Movement, "cp.async.bulk.tensor"), SM90 and later. A tensor is described by
// a 128-byte map (hopper/tensor_map.h) in a __grid_constant__ kernel parameter. Coordinates are in elements, innermost
// first. A load signals the bytes of the whole box, including bytes outside of the tensor, to an mbarrier. A store does
// not write outside of the tensor. One thread issues each copy.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Prefetch a map into the descriptor cache.
__device__ __forceinline__ void PrefetchTensorMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Create an L2 policy for boxes that are read once, or by many blocks, or the policy of loads that name none.
__device__ __forceinline__ uint64_t PolicyEvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t PolicyEvictLast() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t PolicyEvictNormal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Load the box at (x, y) to shared memory `to`, and signal its bytes to `barrier`.
__device__ __forceinline__ void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

/// Load a box of a three-dimensional tensor.
__device__ __forceinline__ void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// Load a box of a three-dimensional tensor with an L2 policy.
__device__ __forceinline__ void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

/// Load a box to `to` in each block of the cluster whose bit is set in `blocks`, and signal the bytes to the barrier
/// with this address in each of these blocks.
__device__ __forceinline__ void LoadBoxMulticast(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z,
                                                 uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

/// Copy `bytes` of global memory (both aligned to 16, a multiple of 16) to shared memory, and signal them to `barrier`
/// (PTX ISA: "cp.async.bulk").
__device__ __forceinline__ void LoadBulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Make shared-memory writes of this thread visible to TMA and to wgmma. Called by each writing thread, before the
/// barrier after which a store is issued.
__device__ __forceinline__ void FenceAsyncProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Store a box from shared memory.
__device__ __forceinline__ void StoreBox(const void* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void StoreBox(const void* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}

/// Close a group of this thread's stores.
__device__ __forceinline__ void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Wait until the shared memory of all but this thread's latest `PENDING` groups may be written again.
template <int PENDING>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

#endif

}  // namespace ptx
}  // namespace flashinfer
