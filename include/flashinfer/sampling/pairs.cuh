// SPDX-License-Identifier: Apache-2.0
// Kernel that renormalises what top-p keeps of many rows. The rows are as many as blocks that run at a time, and one
// block for each is fastest, as long as it can list what may be kept. Which rows it cannot turns out only when it looks at
// them: therefore blocks are pairs, and a row that one cannot write alone is written by both (sieve.cuh, split.cuh).
#pragma once
#include "split.cuh"

namespace flashinfer {
namespace sampling {

/// Write the rows of a pair that one block has not written alone. Not inlined: it is rare, and registers are few.
template <typename T>
__device__ __noinline__ void WriteTogether(const RowParams<T>& p, bool is_written, unsigned char* memory) {
  SieveShared& shared = *reinterpret_cast<SieveShared*>(memory);
  Cluster::Wait();  // the other block runs
  if (threadIdx.x < 2) Cluster::InBlock(shared.is_written, threadIdx.x)[Cluster::Rank()] = is_written;
  Cluster::Sync();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (shared.is_written[i]) continue;
    const int row = 2 * ptx::ClusterId() + i;
    if (!SieveRow<T, false, Cluster>(p, row, memory)) SplitRow<T, false>(p, row, memory);
    Cluster::Sync();  // nobody needs what is in shared memory any more
  }
}

template <typename T>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) PairsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::GridDependencyWait();
  Cluster::Arrive();
  const int row = blockIdx.x;
  WriteTogether(p, row >= p.rows || SieveRow<T, false, Alone>(p, row, memory), memory);
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
