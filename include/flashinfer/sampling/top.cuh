// SPDX-License-Identifier: Apache-2.0
// The kernel that draws from what top-k and top-p keep of probabilities (definitions and parameters: sampling.h). A
// cluster of blocks for each output, or one block.
#pragma once
#include "again.cuh"
#include "near.cuh"

namespace flashinfer {
namespace sampling {

__global__ void __launch_bounds__(TOP_THREADS, 4) TopKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  NearShared& shared = *reinterpret_cast<NearShared*>(memory);
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  Range range;
  int column = SampleNear(source, AskedOf(p, output, row), [&] { return RandomOf(p, output); }, range, shared);
  if (column == NOT_NEAR) column = SampleAgain(source, range, &shared);
  if (column != ELSEWHERE) WriteToken(p, output, column);
}

}  // namespace sampling

FLASHINFER_INLINE Status SampleTop(const SampleParams& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<TopKernel>(device);
  if (status != cudaSuccess) return status;
  Geometry g{1, TOP_THREADS, false, sizeof(NearShared)};
  if (device.has_clusters) {
    // H200, vocabulary 128256, top_p of 0.9, us by clusters of 16 / 8 / 4 / 2 / 1: 1 row 13.8 / 14.9, 16 rows
    // 19.4 / 17.3 / 18.4, 32 rows - / 21.2 / 21.2 / 24.8, 64 rows - / 33.2 / 26.8 / 26.0, 128 rows
    // - / - / 44.5 / 33.2 / 40.4.
    const int64_t chunks = CeilDiv(p.vocab, SEGMENT);
    const auto is_worth = [&](int blocks) {
      return blocks * TOP_WARPS < 2 * chunks && p.batch * (blocks == 2 ? 1 : blocks) <= device.multiprocessors;
    };
    const int largest = LargestCluster<TopKernel>(TOP_THREADS, sizeof(NearShared));
    while (g.cluster < largest && is_worth(2 * g.cluster)) g.cluster *= 2;
  }
  return LaunchClusters(TopKernel, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
