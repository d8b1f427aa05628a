// SPDX-License-Identifier: Apache-2.0
// Barriers of some warps of a block (PTX ISA: Parallel Synchronization, "bar"). Barrier 0 is __syncthreads'.
#pragma once

namespace flashinfer {
namespace ptx {

/// Wait until `threads` threads (whole warps) have arrived at barrier `id`. Writes before the barrier are visible after
/// it.
__device__ __forceinline__ void BarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Wait like BarrierSync, for warps that reach the barrier in different places of the code: `bar.sync` is
/// `barrier.sync.aligned`, which must be one instruction for all threads (synccheck reports the others). Modules for
/// racecheck have a second barrier, id + 8 (so that `id` must be below 8): with one, the tool reports accesses of MLA that
/// the barrier orders.
__device__ __forceinline__ void BarrierSyncApart(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#ifdef FLASHINFER_RACECHECK
  asm volatile("barrier.sync %0, %1;" ::"r"(id + 8), "r"(threads) : "memory");
#endif
}

/// Arrive at barrier `id` without waiting. Threads that wait there with BarrierSync count in `threads` too.
__device__ __forceinline__ void BarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Synchronise like BarrierSync, and return true if any thread passed true.
__device__ __forceinline__ bool BarrierAny(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(int(value))
      : "memory");
  return any != 0;
}

}  // namespace ptx
}  // namespace flashinfer
