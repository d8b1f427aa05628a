// SPDX-License-Identifier: Apache-2.0
// Kernels that write what top-k and top-p keep of rows: renormalisation, masks (definitions and parameters:
// sampling.h). A cluster of up to 8 blocks for each row (sieve.cuh).
// H200, vocabulary 128256, us at 1 / 64 / 512 rows: top_k of 50 renormalised 16.5 / 43.4 / 141.5, masked 15.7 / 42.1 /
// 141.5; top_p of 0.9 of rows that keep 4 % 21.3 / 54.8 / 177, of rows that keep 60 %, which are sought, 62 / 159 /
// 485.
#pragma once
#include "sieve.cuh"

namespace flashinfer {
namespace sampling {

template <typename T, bool SIGNED>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Sieve<T, SIGNED>(p, ptx::ClusterId(), memory).Run();
}

/// Four blocks on an SM, and no more than those unless rows are long. What top-p keeps may be more than one block can
/// list.
template <typename T, bool SIGNED>
Status LaunchSieve(const RowParams<T>& p, Stream stream) {
  cudaError_t status;
  const Device& device = Device::Current(status);
  if (status != cudaSuccess) return status;
  bool has_cluster_code = false;
  status = PrepareKernel<RowsKernel<T, SIGNED>>(device, has_cluster_code);
  if (status != cudaSuccess) return status;
  const bool by_mass = p.filter.top_p.values != nullptr || p.filter.top_p.value < 1.f;
  Geometry g{1, CHUNK_THREADS, false, SIEVE_BYTES};
  const int64_t chunks = CeilDiv(p.vocab, CHUNK);
  while (device.has_clusters && has_cluster_code && g.cluster < MAX_CLUSTER &&
         (chunks > SIEVE_CHUNKS * g.cluster || (by_mass && g.cluster == 1 && chunks > 2 * CHUNK_WARPS) ||
          (chunks > CHUNK_WARPS * g.cluster && p.rows * g.cluster <= 2 * device.multiprocessors))) {
    g.cluster *= 2;
  }
  return LaunchClusters(RowsKernel<T, SIGNED>, g, p.rows, false, stream, p);
}

}  // namespace sampling

template <typename T>
Status RenormRows(const RowParams<T>& p, Stream stream) {
  return sampling::LaunchSieve<T, false>(p, stream);
}

template <typename T>
Status MaskRows(const RowParams<T>& p, Stream stream) {
  return sampling::LaunchSieve<T, true>(p, stream);
}

}  // namespace flashinfer
