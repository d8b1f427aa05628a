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

template <typename T, int WARPGROUPS>
cudaError_t LaunchScan(const DeltaParams<T>& p, const Maps& maps, cudaStream_t stream) {
  using S = Shape<WARPGROUPS>;
  const auto kernel = ScanChunksSm90Kernel<T, S>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(unsigned(p.requests) * p.num_heads * (2 / WARPGROUPS));
  return LaunchShared(kernel, grid, dim3(S::THREADS), S::BYTES, p.enable_pdl, stream, p, maps);
}

}  // namespace sm90

/// Run both kernels. Halves of heads are on different SMs where that leaves none without work.
template <typename T>
Status GdnPrefill(const DeltaParams<T>& p, Stream stream) {
  sm90::Maps maps;
  Status status = sm90::EncodeRows(&maps.q, p.q, p.num_q_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.k, p.k, p.num_k_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.v, p.v, p.num_v_heads, p.tokens);
  if (status == cudaSuccess) status = sm90::EncodeRows(&maps.o, p.o, p.num_heads, p.tokens, 16);
  if (status == cudaSuccess) status = PrepareChunks(p, stream);
  if (status != cudaSuccess) return status;
  const bool is_small = int64_t(p.requests) * p.num_heads * 2 <= p.num_sms;
  return is_small ? sm90::LaunchScan<T, 1>(p, maps, stream) : sm90::LaunchScan<T, 2>(p, maps, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
