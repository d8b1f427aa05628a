// SPDX-License-Identifier: Apache-2.0
// Kernels that write what top-k and top-p keep of rows: renormalisation, masks (definitions and parameters:
// sampling.h). A cluster of up to 8 blocks for each row (sieve.cuh), or pairs of blocks for many (pairs.cuh).
// H200, vocabulary 128256, us at 1 / 64 / 512 rows: top_k of 50 renormalised 17.6 / 38.2 / 141, masked 16.6 / 36.4 / 141,
// top_p of 0.9 of rows that keep 4 % 22.0 / 45.8 / 156, 0.1 % 17.8 / 38.7 / 145. Rows that keep most of their columns, or
// that have many ties, are read twice or thrice: up to 63 / 89 / 351, equal ones at 64 / 512 rows 73 / 293.
#pragma once
#include <algorithm>
#include <type_traits>

#include "pairs.cuh"

namespace flashinfer {
namespace sampling {

template <typename T, bool SIGNED>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::GridDependencyWait();
  const int row = ptx::ClusterId();
  if (!SieveRow<T, SIGNED, Cluster>(p, row, memory)) SplitRow<T, SIGNED>(p, row, memory);
}

constexpr int FEW_COLUMNS = 1024;
constexpr int LONG_CHUNKS = 112;  // of a block: with more, what top-p leaves uncertain is more than a short list holds

/// Up to two blocks for each SM: 64 rows by clusters of 8 / 4 blocks take 57.9 / 43.5 us (top_p of 0.9), 128 rows by
/// clusters of 4 / 2 79.3 / 59.9. More where rows are long. What top-p keeps may be more than one block can list: two for
/// each row, unless rows are as many as blocks that run at once. Then pairs of blocks, one for each row while it can be
/// listed: 512 rows 156 us instead of 176, and of 32000 columns 56 instead of 70; but 195 - 219 instead of 179 - 186 where
/// logits of standard deviation 2.7 to 2.9 instead of 3 make rows that one block cannot list.
template <typename T, bool SIGNED>
Status LaunchSieve(const RowParams<T>& p, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<RowsKernel<T, SIGNED>>(device);
  if (status != cudaSuccess) return status;
  // Lists of few columns leave room for the bits of more chunks.
  const bool is_few = p.filter.top_k.values == nullptr && p.filter.top_k.value <= FEW_COLUMNS;
  const bool by_mass = p.filter.top_p.values != nullptr || p.filter.top_p.value < 1.f;
  Geometry g{1, CHUNK_THREADS, false, SIEVE_BYTES};
  const int64_t chunks = CeilDiv(p.vocab, CHUNK);
  while (device.has_clusters && g.cluster < MAX_CLUSTER &&
         (chunks > (is_few ? 2 : 1) * SIEVE_CHUNKS * g.cluster ||
          (by_mass && g.cluster == 1 && chunks > 2 * CHUNK_WARPS) ||
          (chunks > CHUNK_WARPS * g.cluster && p.rows * g.cluster <= device.multiprocessors))) {
    g.cluster *= 2;
  }
  // Long lists where two blocks share an SM anyway, and of long rows. Top_p of 0.9 of 128256 columns, logits of standard
  // deviation 2 / 2.5, 48 rows: 73 / 45 -> 54 / 45 us, 128 rows 118 / 100 -> 85 / 71; of 262144 columns, 3 / 5, 128 rows
  // 203 / 88 -> 104 / 86, 256 rows 349 / 147 -> 201 / 170. Clusters of more than two blocks leave SMs of a GPC unused,
  // and one that has to wait doubles the time: not where they would be nearly all that fit (64 rows 46 -> 62).
  const int64_t blocks = p.rows * g.cluster;
  const int fitting = 2 * device.multiprocessors - (g.cluster > 2 ? device.multiprocessors / 6 : 0);
  const bool are_two = blocks > device.multiprocessors && blocks <= fitting;
  if (are_two || (by_mass && chunks > LONG_CHUNKS * g.cluster)) {
    g.shared_bytes = std::max(SIEVE_BYTES, device.shared_bytes / 2 - 1024);
  }
  if constexpr (!SIGNED && std::is_same_v<T, float>) {  // top-p is asked of floats only
    const bool are_many = p.rows > 2 * device.multiprocessors;
    if (device.has_clusters && by_mass && are_many && chunks > 2 * CHUNK_WARPS && chunks <= SIEVE_CHUNKS) {
      return RenormPairs(p, stream);
    }
  }
  return LaunchClusters(RowsKernel<T, SIGNED>, g, p.rows, p.enable_pdl, stream, p);
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
