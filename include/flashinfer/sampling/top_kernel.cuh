// SPDX-License-Identifier: Apache-2.0
// The kernel of top.cuh, apart from the choice between its forms: each form is a unit of its own where modules are built.
#pragma once
#include "again.cuh"
#include "near.cuh"

namespace flashinfer {
namespace sampling {

/// MAY_BE_LONG: kernels of their own, because code that is jumped over takes time for few rows, too: 1 row 14.2 -> 15.1
/// us.
template <int THREADS, bool MAY_BE_LONG>
__global__ void __launch_bounds__(THREADS, THREADS == TOP_THREADS ? 4 : 1)
    TopKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  NearShared& shared = *reinterpret_cast<NearShared*>(memory);
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const auto random = [&] { return RandomOf(p, output); };
  Range range;
  int column = SampleNear<THREADS, MAY_BE_LONG>(source, AskedOf(p, output, row), random, range, shared);
  if (column == NOT_NEAR) {
    if (threadIdx.x >= TOP_THREADS) return;  // barriers do not wait for threads that have returned
    column = SampleAgain(source, range, &shared);
  }
  if (column != ELSEWHERE) WriteToken(p, output, column);
}

template <int THREADS, bool MAY_BE_LONG>
Status LaunchTop(const SampleParams& p, int cluster, Stream stream) {
  Device device;
  const cudaError_t status = PrepareKernel<TopKernel<THREADS, MAY_BE_LONG>>(device);
  if (status != cudaSuccess) return status;
  // Asked of each kernel that is to have clusters of 16, which have to be allowed first.
  if (cluster > MAX_CLUSTER) {
    cluster = std::min(cluster, LargestCluster<TopKernel<THREADS, MAY_BE_LONG>>(THREADS, sizeof(NearShared)));
  }
  const Geometry g{cluster, THREADS, false, sizeof(NearShared)};
  return LaunchClusters(TopKernel<THREADS, MAY_BE_LONG>, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace sampling
}  // namespace flashinfer
