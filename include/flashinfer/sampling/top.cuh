// SPDX-License-Identifier: Apache-2.0
// Draws from what top-k and top-p keep of probabilities (definitions and parameters: sampling.h). A cluster of blocks for
// each output, or one block.
#pragma once
#include "top_kernel.cuh"

namespace flashinfer {
namespace sampling {

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
