// SPDX-License-Identifier: Apache-2.0
// The kernel of sample_top_k_top_p.cuh without its launch heuristics: each instantiation is compiled as a unit of its
// own.
#pragma once
#include "sample_retry.cuh"
#include "sample_one_pass.cuh"

namespace flashinfer {
namespace sampling {

/// MAY_BE_LONG is a separate instantiation, because even skipped code takes time where rows are few.
template <int THREADS, bool MAY_BE_LONG>
__global__ void __launch_bounds__(THREADS, THREADS == TOP_THREADS ? 4 : 1)
    TopKTopPKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  OnePassShared& shared = *reinterpret_cast<OnePassShared*>(memory);
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const auto random = [&] { return RandomOf(p, output); };
  WeightRange range;
  int column = SampleOnePass<THREADS, MAY_BE_LONG>(source, RequestedFilterOf(p, output, row), random, range, shared);
  if (column == NOT_FOUND) {
    if (threadIdx.x >= TOP_THREADS) return;  // barriers do not wait for threads that have returned
    column = SampleRetry(source, range, &shared);
  }
  if (column != ELSEWHERE) WriteToken(p, output, column);
}

template <int THREADS, bool MAY_BE_LONG>
Status LaunchTopKTopP(const SampleParams& p, int cluster, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<TopKTopPKernel<THREADS, MAY_BE_LONG>>(device);
  if (status != cudaSuccess) return status;
  // Clusters of 16 have to be allowed for each kernel first.
  if (cluster > MAX_CLUSTER) {
    cluster = std::min(cluster, LargestCluster<TopKTopPKernel<THREADS, MAY_BE_LONG>>(THREADS, sizeof(OnePassShared)));
  }
  const Geometry g{cluster, THREADS, false, sizeof(OnePassShared)};
  return LaunchClusters(TopKTopPKernel<THREADS, MAY_BE_LONG>, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace sampling
}  // namespace flashinfer
