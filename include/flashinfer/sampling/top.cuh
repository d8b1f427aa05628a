// SPDX-License-Identifier: Apache-2.0
// The kernel that draws from what top-k and top-p keep of probabilities (definitions and parameters: sampling.h). A
// cluster of blocks for each output, or one block.
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
cudaError_t LaunchTop(const SampleParams& p, int cluster, Stream stream) {
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

/// Blocks for each row, and whether they are wide.
inline int TopCluster(const SampleParams& p, const Device& device, bool& is_wide) {
  is_wide = false;
  if (!device.has_clusters) return 1;
  // H200, vocabulary 128256, top_p of 0.9, us by clusters of 16 / 8 / 4 / 2 / 1: 1 row 13.8 / 14.9, 16 rows
  // 19.4 / 17.3 / 18.4, 32 rows - / 21.2 / 21.2 / 24.8, 64 rows - / 33.2 / 26.8 / 26.0, 128 rows
  // - / - / 44.5 / 33.2 / 40.4.
  const int64_t chunks = CeilDiv(p.vocab, SEGMENT);
  const auto is_worth = [&](int blocks) {
    return blocks * TOP_WARPS < 2 * chunks && p.batch * (blocks == 2 ? 1 : blocks) <= device.multiprocessors;
  };
  const int largest = LargestCluster<TopKernel<TOP_THREADS, false>>(TOP_THREADS, sizeof(NearShared));
  int cluster = 1;
  while (cluster < largest && is_worth(2 * cluster)) cluster *= 2;
  // Wide blocks where they take most SMs, one for each: 48 / 64 / 96 / 128 rows 24.3 / 25.2 / 30.0 / 33.0 -> 21.8 /
  // 23.2 / 28.6 / 31.1, 64 rows of 151936 columns 27.6 -> 24.7.
  is_wide = cluster <= 2 && p.batch <= device.multiprocessors && chunks > 2 * TOP_WARPS;
  if (is_wide) cluster = 2 * p.batch <= device.multiprocessors ? 2 : 1;
  return cluster;
}

}  // namespace sampling

FLASHINFER_INLINE Status SampleTop(const SampleParams& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<TopKernel<TOP_THREADS, false>>(device);
  if (status != cudaSuccess) return status;
  bool is_wide;
  const int cluster = TopCluster(p, device, is_wide);
  if (is_wide) return LaunchTop<WIDE_THREADS, true>(p, cluster, stream);
  // 64 / 512 rows of 262144 columns 60.0 / 211 -> 35.6 / 154: their lists had been too short.
  if (p.vocab > GUESS_LONG) return LaunchTop<TOP_THREADS, true>(p, cluster, stream);
  return LaunchTop<TOP_THREADS, false>(p, cluster, stream);
}

}  // namespace flashinfer
