// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90: all launches.
#pragma once
#include "../../hopper/tensor_map_cache.h"
#include "../chunk/normalize.cuh"
#include "../chunk/prepare.cuh"
#include "passes.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

/// Encode rows [token, head, DIM]. Boxes of 64 columns are swizzled slabs, others lie as they are.
template <typename T>
cudaError_t EncodeRows(CUtensorMap* map, const T* data, int heads, int64_t tokens, int columns = DIM / 2) {
  hopper::TensorBox t;
  t.data = data;
  t.size[0] = DIM, t.size[1] = uint64_t(heads), t.size[2] = uint64_t(tokens);
  t.stride_bytes[0] = DIM * sizeof(T), t.stride_bytes[1] = uint64_t(heads) * DIM * sizeof(T);
  t.box[0] = uint32_t(columns), t.box[1] = 1, t.box[2] = CHUNK;
  t.swizzle = columns == DIM / 2;
  return hopper::FindTensorMap(map, t);
}

/// Launch whole requests: halves of heads are on different SMs where that leaves none without work.
template <typename T>
cudaError_t LaunchWhole(const DeltaParams<T>& p, const Maps& maps, cudaStream_t stream) {
  return int64_t(p.requests) * p.num_heads * 2 <= p.num_sms
             ? LaunchScan<T, Shape<1>, Pass::kWhole>(p, maps, p.requests, stream)
             : LaunchScan<T, Shape<2>, Pass::kWhole>(p, maps, p.requests, stream);
}

}  // namespace sm90

template <typename T>
Status GdnPrefill(const DeltaParams<T>& p, Stream stream) {
  using sm90::Pass;
  sm90::Maps maps;
  Status status = sm90::EncodeRows(&maps.q, p.q, p.num_q_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.k, p.k, p.num_k_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.v, p.v, p.num_v_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.o, p.o, p.num_heads, p.tokens, 16);
  if (status == cudaSuccess) status = PrepareChunks(p, stream);
  if (status != cudaSuccess) return status;
  if (p.segment == 0) return sm90::LaunchWhole(p, maps, stream);
  const int64_t parts = FirstChunkSlot(p.requests, p.tokens, p.segment);
  status = sm90::LaunchScan<T, sm90::Shape<2>, Pass::kTransfer>(p, maps, parts, stream);
  if (status != cudaSuccess) return status;
  status = sm90::LaunchStartStates(p, stream);
  if (status != cudaSuccess) return status;
  // One warpgroup: requests are split where heads are few, and the form for two spills 184 bytes.
  return sm90::LaunchScan<T, sm90::Shape<1>, Pass::kParts>(p, maps, parts, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
