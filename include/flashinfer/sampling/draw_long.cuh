// SPDX-License-Identifier: Apache-2.0
// draw.cuh for rows that no cluster can hold: a block reads one again and again. A kernel unit of its own.
#pragma once
#include "draw.cuh"

namespace flashinfer {

FLASHINFER_INLINE Status SampleLong(const SampleParams& p, Stream stream) {
  using namespace sampling;
  const Geometry g{1, Threads(false), false, sizeof(Shared)};
  return LaunchClusters(SampleKernel<false>, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
