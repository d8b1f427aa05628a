// SPDX-License-Identifier: Apache-2.0
// The kernel of kernel.cuh for 16-bit weights.
#pragma once
#include "kernel.cuh"

namespace flashinfer {
namespace fused_moe {

FLASHINFER_INLINE Status MonoPlain(const MonoParams& p, Stream stream) {
  if (p.element == Element::kFloat16) return LaunchMono<mono::PlainWeights<__half>>(p, stream);
  return LaunchMono<mono::PlainWeights<__nv_bfloat16>>(p, stream);
}

}  // namespace fused_moe
}  // namespace flashinfer
