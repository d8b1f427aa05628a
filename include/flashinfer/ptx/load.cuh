// SPDX-License-Identifier: Apache-2.0
// Loads with a hint for the L2 cache (PTX ISA: "createpolicy", "ld.global.L2::cache_hint"), SM80 and later.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Load four floats that are read only once, or return `pad` if not `exists`. L2 evicts the line before other lines
/// (policy evict-first), so that written lines stay in the cache.
__device__ __forceinline__ void LoadOnce(bool exists, const float* from, float pad, float (&x)[4]) {
  x[0] = x[1] = x[2] = x[3] = pad;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %6, 0;\n"
      "@p ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;\n}"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
      : "l"(from), "l"(policy), "r"(uint32_t(exists)));
#else
  if (!exists) return;
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#endif
}

/// Create the L2 evict-first policy for LoadOnce. Call it in each loop: a policy that lives across loops is kept in
/// ordinary registers, from which every load has to fetch it.
__device__ __forceinline__ uint64_t OncePolicy() {
  uint64_t policy = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

/// Load four floats with the policy of OncePolicy.
__device__ __forceinline__ void LoadOnce(const float* from, uint64_t policy, float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from), "l"(policy));
#else
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#endif
}

}  // namespace ptx
}  // namespace flashinfer
