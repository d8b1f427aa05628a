// SPDX-License-Identifier: Apache-2.0
// Registers moved between warpgroups of a block (PTX ISA: Miscellaneous, "setmaxnreg"), sm_90a. All warps of a
// warpgroup execute it with the same count, a multiple of 8 in 24 .. 256; the kernel has __launch_bounds__(threads, 1),
// and roles are the two sides of one branch, or ptxas ignores it (C7508). It is a no-op elsewhere.
#pragma once

namespace flashinfer {
namespace ptx {

/// Release the registers above `COUNT` per thread to the block.
template <int COUNT>
__device__ __forceinline__ void ReleaseRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

/// Acquire registers up to `COUNT` per thread. Waits until other warpgroups have released enough.
template <int COUNT>
__device__ __forceinline__ void TakeRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

}  // namespace ptx
}  // namespace flashinfer
