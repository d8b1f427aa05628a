// SPDX-License-Identifier: Apache-2.0
// Launch of sampling with top-k and top-p from probabilities (definitions and parameters: sampling.h): one cluster of
// blocks, or one block, per output. The kernel is in sample_one_pass.cuh.
#pragma once
#include "sample_one_pass.cuh"

namespace flashinfer {
namespace sampling {

/// Return the blocks per row; `is_wide` becomes whether they are wide.
inline int TopKTopPCluster(const SampleParams& p, const Device& device, bool& is_wide) {
  is_wide = false;
  if (!device.has_clusters) return 1;
  // Measurements of cluster sizes: docs/performance/sampling.md.
  const int64_t chunks = CeilDiv(p.vocab, SEGMENT);
  const auto is_worth = [&](int blocks) {
    return blocks * TOP_WARPS < 2 * chunks && p.batch * (blocks == 2 ? 1 : blocks) <= device.multiprocessors;
  };
  const int largest = LargestCluster<TopKTopPKernel<TOP_THREADS, false>>(TOP_THREADS, sizeof(OnePassShared));
  int cluster = 1;
  while (cluster < largest && is_worth(2 * cluster)) cluster *= 2;
  // Wide blocks where they occupy most SMs, one per SM.
  is_wide = cluster <= 2 && p.batch <= device.multiprocessors && chunks > 2 * TOP_WARPS;
  if (is_wide) cluster = 2 * p.batch <= device.multiprocessors ? 2 : 1;
  return cluster;
}

}  // namespace sampling

FLASHINFER_INLINE Status SampleTop(const SampleParams& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<TopKTopPKernel<TOP_THREADS, false>>(device);
  if (status != cudaSuccess) return status;
  bool is_wide;
  const int cluster = TopKTopPCluster(p, device, is_wide);
  if (is_wide) return LaunchTopKTopP<WIDE_THREADS, true>(p, cluster, stream);
  // Long rows need a larger sample; otherwise their lists overflow.
  if (p.vocab > ESTIMATE_LONG) return LaunchTopKTopP<TOP_THREADS, true>(p, cluster, stream);
  return LaunchTopKTopP<TOP_THREADS, false>(p, cluster, stream);
}

}  // namespace flashinfer
