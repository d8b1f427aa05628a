// SPDX-License-Identifier: Apache-2.0
// Kernel that renormalises many rows with top-p. One block per row is fastest as long as it can list the survivors,
// which a sample of the row tells. Blocks therefore form pairs, which process both of their rows together if one of
// them has too many survivors (filter_rows.cuh, filter_rows_fallback.cuh).
#pragma once
#include "filter_rows_fallback.cuh"

namespace flashinfer {
namespace sampling {

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

}  // namespace sampling

template <typename T>
Status RenormRowsByCtaPair(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<CtaPairKernel<T>>(device);
  if (status != cudaSuccess) return status;
  const Geometry pairs{2, CHUNK_THREADS, false, FILTER_BYTES};
  return LaunchClusters(CtaPairKernel<T>, pairs, CeilDiv(p.rows, 2), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
