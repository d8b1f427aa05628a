// SPDX-License-Identifier: Apache-2.0
// Dispatch of a tile to its kernel: definitions of the functions that common/backend_interface.h declares.
#pragma once
#include "decode/kernel.cuh"
#include "prefill/kernel.cuh"

namespace flashinfer {
namespace attention {

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if constexpr (SERVED_BY_DECODE_KERNEL<Params, TILE>) {
    return LaunchDecode<Params, PAGED, ALL_MASKED>(params, work, enable_pdl, stream);
  } else {
    return LaunchPrefill<Params, TILE, PAGED, ALL_MASKED>(params, work, enable_pdl, stream);
  }
}

}  // namespace attention
}  // namespace flashinfer
