// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies to shared memory (PTX ISA: Data Movement, "cp.async"). Before SM80 the copies are synchronous.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Copy 16 bytes from global memory, or write zeros without reading `from` if not `valid`.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
#else
  const uint4 x = valid ? *static_cast<const uint4*>(from) : uint4{};
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
#endif
}

/// Copy 4 bytes from global memory.
__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#else
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(*static_cast<const uint32_t*>(from)) : "memory");
#endif
}

/// Store 4 or 16 bytes from registers to shared memory.
__device__ __forceinline__ void StoreShared4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void StoreShared16(uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}

__device__ __forceinline__ void StoreShared8(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
/// Load 4, 8 or 16 bytes from shared memory, not before copies that were waited for.
__device__ __forceinline__ uint32_t LoadShared4(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ float2 LoadShared8(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ float4 LoadShared16(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/// Copy 16 bytes like the overload above. `goes_first`: L2 evicts the line before other lines (policy evict-first).
/// (The policy evict-normal is slower than no policy.)
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid,
                                            [[maybe_unused]] bool goes_first) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // One asm statement: otherwise the compiler duplicates the surrounding code.
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n"
      "@!p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n"
      "}" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0), "l"(policy), "r"(uint32_t(goes_first)));
#else
  CopyAsync16(to, from, valid);
#endif
}

__device__ __forceinline__ void CopyCommit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Wait until at most N committed groups of this thread are unfinished.
template <int N>
__device__ __forceinline__ void CopyWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

}  // namespace ptx
}  // namespace flashinfer
