// SPDX-License-Identifier: Apache-2.0
// Chunked Kimi delta attention on SM90: both launches. The second kernel is that of the gated delta rule (kernel.cuh).
#pragma once
#include "../../hopper/tensor_map_cache.h"
#include "../chunk/kda_prepare.cuh"
#include "launch.cuh"

namespace flashinfer {
namespace recurrent {

template <typename T>
Status KdaPrefill(const KdaParams<T>& p, Stream stream) {
  using sm90::Pass;
  sm90::Maps maps{};
  Status status = sm90::EncodeRows(&maps.v, p.v, p.num_v_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.o, p.o, p.num_heads, p.tokens, 16);
  if (status == cudaSuccess) status = PrepareKda(p, stream);
  if (status != cudaSuccess) return status;
  const DeltaParams<T>& rest = p;
  return int64_t(p.requests) * p.num_heads * 2 <= p.num_sms
             ? sm90::LaunchScan<T, sm90::KdaShape<1>, Pass::kWhole>(rest, maps, p.requests, stream)
             : sm90::LaunchScan<T, sm90::KdaShape<2>, Pass::kWhole>(rest, maps, p.requests, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
