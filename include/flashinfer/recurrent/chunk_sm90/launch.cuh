// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90: both launches.
#pragma once
#include "../../hopper/tensor_map_cache.h"
#include "../chunk/normalize.cuh"
#include "../chunk/prepare.cuh"
#include "kernel.cuh"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

/// Encode rows [token, head, DIM]. Boxes of 64 columns are swizzled slabs, others lie as they are.
template <typename T>
cudaError_t EncodeRows(CUtensorMap* map, const T* data, int heads, int64_t tokens, int columns = HALF) {
  hopper::TensorBox t;
  t.data = data;
  t.size[0] = DIM, t.size[1] = uint64_t(heads), t.size[2] = uint64_t(tokens);
  t.stride_bytes[0] = DIM * sizeof(T), t.stride_bytes[1] = uint64_t(heads) * DIM * sizeof(T);
  t.box[0] = uint32_t(columns), t.box[1] = 1, t.box[2] = CHUNK;
  t.swizzle = columns == HALF;
  return hopper::FindTensorMap(map, t);
}

/// Launch a pass over `items` requests, or parts of requests, of all heads.
template <typename T, int WARPGROUPS, Pass PASS>
cudaError_t LaunchScan(const DeltaParams<T>& p, const Maps& maps, int64_t items, cudaStream_t stream) {
  using S = Shape<WARPGROUPS>;
  const auto kernel = ScanChunksSm90Kernel<T, S, PASS>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES);
  if (allowed != cudaSuccess) return allowed;
  const int blocks = PASS == Pass::kTransfer ? 2 : 2 / WARPGROUPS;  // for a head
  const dim3 grid(unsigned(items) * p.num_heads * blocks);
  return LaunchShared(kernel, grid, dim3(S::THREADS), S::BYTES, p.enable_pdl, stream, p, maps);
}

/// Launch whole requests: halves of heads are on different SMs where that leaves none without work.
template <typename T>
cudaError_t LaunchWhole(const DeltaParams<T>& p, const Maps& maps, cudaStream_t stream) {
  return int64_t(p.requests) * p.num_heads * 2 <= p.num_sms
             ? LaunchScan<T, 1, Pass::kWhole>(p, maps, p.requests, stream)
             : LaunchScan<T, 2, Pass::kWhole>(p, maps, p.requests, stream);
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
  status = sm90::LaunchScan<T, 2, Pass::kTransfer>(p, maps, parts, stream);
  if (status != cudaSuccess) return status;
  const dim3 grid(unsigned(p.requests) * p.num_heads * (DIM / sm90::START_ROWS));
  status = Launch(sm90::StartStatesKernel<T>, grid, dim3(sm90::START_THREADS), p.enable_pdl, stream, p);
  if (status != cudaSuccess) return status;
  // One warpgroup: requests are split where heads are few, and the form for two spills 184 bytes.
  return sm90::LaunchScan<T, 1, Pass::kParts>(p, maps, parts, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
