// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a tile: definitions of what entry.h declares.
#pragma once
#include "narrow.cuh"
#include "wide.cuh"

namespace flashinfer {
namespace attention {

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if constexpr (SERVED_BY_NARROW<Params, TILE>) {
    return LaunchNarrow<Params, PAGED, ALL_MASKED>(params, work, enable_pdl, stream);
  } else {
    return LaunchWide<Params, TILE, PAGED, ALL_MASKED>(params, work, enable_pdl, stream);
  }
}

}  // namespace attention
}  // namespace flashinfer
