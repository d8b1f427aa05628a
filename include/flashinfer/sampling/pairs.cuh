// SPDX-License-Identifier: Apache-2.0
// Kernel that renormalises what top-p keeps of many rows. One block for each row is fastest, as long as it can list what
// may be kept. It knows from a sample of the row; therefore blocks are pairs, and write both of their rows together if one
// of them has too many such columns (sieve.cuh, split.cuh).
#pragma once
#include "split.cuh"

namespace flashinfer {
namespace sampling {

/// Write the rows of a pair that are not written yet, by both blocks. Not inlined: it is rare, and registers are few.
template <typename T>
__device__ __noinline__ void WriteTogether(const RowParams<T>& p, unsigned char* memory) {
  const SieveShared& shared = *reinterpret_cast<SieveShared*>(memory);
  // Rows may need all of `memory`.
  const int written = (shared.is_written[0] ? 1 : 0) + (shared.is_written[1] ? 2 : 0);
  const Bounds bounds[2] = {shared.bounds[0], shared.bounds[1]};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (written >> i & 1) continue;
    const int row = 2 * ptx::ClusterId() + i;
    const bool has_room = Sieve<T, false, Cluster>(p, row, memory).HasRoom(bounds[i]);
    if (!has_room || !SieveRow<T, false, Cluster>(p, row, bounds[i], memory)) SplitRow<T, false>(p, row, memory);
    Cluster::Sync();  // nobody needs what is in shared memory any more
  }
}

template <typename T>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) PairsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::GridDependencyWait();
  Cluster::Arrive();
  SieveShared& shared = *reinterpret_cast<SieveShared*>(memory);
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
    Sieve<T, false, Alone> sieve(p, row, memory);
    bounds = sieve.FindBoundsOfRow();
    can_list = sieve.HasRoom(bounds);
  }
  Cluster::Wait();  // the other block runs
  tell_both(shared.bounds, bounds);
  if (do_both(shared.can_list, can_list) && !is_written) {
    is_written = SieveRow<T, false, Alone>(p, row, bounds, memory);
  }
  if (!do_both(shared.is_written, is_written)) WriteTogether(p, memory);
}

}  // namespace sampling

template <typename T>
Status RenormPairs(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<PairsKernel<T>>(device);
  if (status != cudaSuccess) return status;
  const Geometry pairs{2, CHUNK_THREADS, false, SIEVE_BYTES};
  return LaunchClusters(PairsKernel<T>, pairs, CeilDiv(p.rows, 2), p.enable_pdl, stream, p);
}

}  // namespace flashinfer
