// SPDX-License-Identifier: Apache-2.0
// Kernels and launch of the filters that write rows: renormalisation and masks with top-k and top-p (definitions and
// parameters: sampling.h). A cluster of up to 8 blocks per row, or pairs of blocks for many rows with top-p; the steps
// are in filter_rows.cuh and filter_rows_fallback.cuh. Measurements: docs/performance/sampling.md.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include <algorithm>
#include <type_traits>

#include "filter_rows_fallback.cuh"

namespace flashinfer {
namespace sampling {

template <typename T, bool SIGNED>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) FilterKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::GridDependencyWait();
  const int row = ptx::ClusterId();
  if (!FilterRow<T, SIGNED, Cluster>(p, row, memory)) FilterRowAsFallback<T, SIGNED>(p, row, memory);
}

/// Write the rows of a pair that are not written yet, by both blocks. Not inlined: rarely called, and registers are
/// scarce.
template <typename T>
__device__ __noinline__ void WriteRowsAsPair(const RowParams<T>& p, unsigned char* memory) {
  const RowFilterShared& shared = *reinterpret_cast<RowFilterShared*>(memory);
  // Copied first: the rows may need all of `memory`.
  const int written = (shared.is_written[0] ? 1 : 0) + (shared.is_written[1] ? 2 : 0);
  const Bounds bounds[2] = {shared.bounds[0], shared.bounds[1]};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (written >> i & 1) continue;
    const int row = 2 * ptx::ClusterId() + i;
    const bool has_room = RowFilter<T, false, Cluster>(p, row, memory).TryReserve(bounds[i]);
    if (!has_room || !FilterRow<T, false, Cluster>(p, row, bounds[i], memory))
      FilterRowAsFallback<T, false>(p, row, memory);
    Cluster::Sync();  // shared memory is free again
  }
}

/// Renormalise many rows with top-p. One block per row is fastest as long as it can list the survivors, which a sample
/// of the row tells. Blocks therefore form pairs, which process both of their rows together if one of them has too
/// many survivors.
template <typename T>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) CtaPairKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::GridDependencyWait();
  Cluster::Arrive();
  RowFilterShared& shared = *reinterpret_cast<RowFilterShared*>(memory);
  const auto tell_both = [](auto(&of)[2], const auto& what) {
    if (threadIdx.x < 2) Cluster::InBlock(&of[0], threadIdx.x)[Cluster::Rank()] = what;
  };
  const auto do_both = [&](uint32_t (&of)[2], bool what) {
    tell_both(of, uint32_t(what));
    Cluster::Sync();
    return of[0] && of[1];
  };
  const int row = blockIdx.x;
  Bounds bounds{};
  bool is_written = row >= p.rows, can_list = is_written;
  if (!is_written) {
    RowFilter<T, false, SingleCta> filter(p, row, memory);
    bounds = filter.FindBoundsOfRow();
    can_list = filter.TryReserve(bounds);
  }
  Cluster::Wait();  // the other block runs
  tell_both(shared.bounds, bounds);
  if (do_both(shared.can_list, can_list) && !is_written) {
    is_written = FilterRow<T, false, SingleCta>(p, row, bounds, memory);
  }
  if (!do_both(shared.is_written, is_written)) WriteRowsAsPair(p, memory);
}

template <typename T>
Status LaunchCtaPairs(const RowParams<T>& p, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<CtaPairKernel<T>>(device);
  if (status != cudaSuccess) return status;
  const Geometry pairs{2, CHUNK_THREADS, false, FILTER_BYTES};
  return LaunchClusters(CtaPairKernel<T>, pairs, CeilDiv(p.rows, 2), p.enable_pdl, stream, p);
}

constexpr int FEW_COLUMNS = 1024;
// Chunks of a block beyond which the uncertain survivors of top-p overflow a short list.
constexpr int LONG_CHUNKS = 112;

/// Choose the cluster size: up to two blocks per SM, more for long rows. With top-p, one block may not be able to list
/// the survivors: two per row, unless there are as many rows as resident blocks; then pairs of blocks, each with a row
/// of its own as long as it can be listed. Measurements: docs/performance/sampling.md.
template <typename T, bool SIGNED>
Status LaunchFilter(const RowParams<T>& p, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<FilterKernel<T, SIGNED>>(device);
  if (status != cudaSuccess) return status;
  // Short lists leave space for the bits of more chunks.
  const bool is_few = p.filter.top_k.values == nullptr && p.filter.top_k.value <= FEW_COLUMNS;
  const bool by_mass = p.filter.top_p.values != nullptr || p.filter.top_p.value < 1.f;
  Geometry g{1, CHUNK_THREADS, false, FILTER_BYTES};
  const int64_t chunks = CeilDiv(p.vocab, CHUNK);
  while (device.has_clusters && g.cluster < MAX_CLUSTER &&
         (chunks > (is_few ? 2 : 1) * FILTER_CHUNKS * g.cluster ||
          (by_mass && g.cluster == 1 && chunks > 2 * CHUNK_WARPS) ||
          (chunks > CHUNK_WARPS * g.cluster && p.rows * g.cluster <= device.multiprocessors))) {
    g.cluster *= 2;
  }
  // Long lists where two blocks share an SM anyway, and for long rows. Clusters of more than two blocks leave SMs of a
  // GPC unused, and a cluster that has to wait doubles the time: not where they would be nearly all that fit.
  const int64_t blocks = p.rows * g.cluster;
  const int fitting = 2 * device.multiprocessors - (g.cluster > 2 ? device.multiprocessors / 6 : 0);
  const bool are_two = blocks > device.multiprocessors && blocks <= fitting;
  if (are_two || (by_mass && chunks > LONG_CHUNKS * g.cluster)) {
    g.shared_bytes = std::max(FILTER_BYTES, device.shared_bytes / 2 - 1024);
  }
  if constexpr (!SIGNED && std::is_same_v<T, float>) {  // top-p exists for floats only
    const bool are_many = p.rows > 2 * device.multiprocessors;
    if (device.has_clusters && by_mass && are_many && chunks > 2 * CHUNK_WARPS && chunks <= FILTER_CHUNKS) {
      return LaunchCtaPairs(p, stream);
    }
  }
  return LaunchClusters(FilterKernel<T, SIGNED>, g, p.rows, p.enable_pdl, stream, p);
}

}  // namespace sampling

template <typename T>
Status RenormRows(const RowParams<T>& p, Stream stream) {
  return sampling::LaunchFilter<T, false>(p, stream);
}

template <typename T>
Status MaskRows(const RowParams<T>& p, Stream stream) {
  return sampling::LaunchFilter<T, true>(p, stream);
}

}  // namespace flashinfer
