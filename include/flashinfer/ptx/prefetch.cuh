// SPDX-License-Identifier: Apache-2.0
// Prefetches (PTX ISA: Data Movement, "prefetch").
#pragma once

namespace flashinfer {
namespace ptx {

/// Bring the line of an address into L2. Nothing waits for it, and an address that cannot be read does no harm.
__device__ __forceinline__ void PrefetchL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace ptx
}  // namespace flashinfer
