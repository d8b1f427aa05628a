// SPDX-License-Identifier: Apache-2.0
// Loads and stores that other GPUs and the host take part in (PTX ISA: Memory Consistency Model, scope ".sys").
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Load 16 bytes that another GPU may write meanwhile. Each 32-bit word is old or new, the four together need not be.
__device__ __forceinline__ uint4 LoadSystem(const uint4* address) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t LoadSystem(const uint32_t* address) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

/// Store 16 bytes that another GPU polls.
__device__ __forceinline__ void StoreSystem(uint4* address, const uint4& x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void StoreSystem(uint32_t* address, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

/// Load a flag: what preceded its StoreReleaseSystem, on any GPU or the host, is visible afterwards.
__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

/// Store a flag that another GPU waits for.
__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace ptx
}  // namespace flashinfer
