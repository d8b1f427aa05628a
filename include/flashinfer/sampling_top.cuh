// SPDX-License-Identifier: Apache-2.0
// The kernel that draws from what top-k keeps of probabilities, or top-k and top-p (definitions and parameters:
// sampling.h). A cluster of up to 8 blocks for each output.
#pragma once
#include "sampling.cuh"
#include "sampling_top_k.cuh"

namespace flashinfer {
namespace sampling {

__global__ void __launch_bounds__(RANK_THREADS, 4) TopKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  TopShared& shared = *reinterpret_cast<TopShared*>(memory);
  ptx::ClusterArrive();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const float* const input = p.input + row * p.row_stride;
  const int vocab = int(p.vocab), top_k = ValueOf(p.filter.top_k, p.filter.top_k_by_output ? output : row);
  Asked asked;
  asked.count = top_k >= vocab ? UNLIMITED : uint64_t(max(top_k, 1));
  asked.top_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
  asked.by_mass = p.filter.filter == Filter::kBoth && !(asked.top_p >= 1.f);
  asked.top_k_first = p.filter.filter == Filter::kTopKFirst && !(asked.top_p >= 1.f);
  uint64_t random = 0;
  if (threadIdx.x == 0 && ptx::ClusterRank() == 0) {
    random = RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
  }
  SampleTopK(input, vocab, asked, random, shared, [&](int column) { WriteToken(p, output, column); });
}

}  // namespace sampling

FLASHINFER_INLINE Status SampleTop(const SampleParams& p, Stream stream) {
  using namespace sampling;
  cudaError_t status;
  const Device& device = Device::Current(status);
  if (status != cudaSuccess) return status;
  bool has_cluster_code = false;
  status = PrepareKernel<TopKernel>(device, has_cluster_code);
  if (status != cudaSuccess) return status;
  Geometry g{1, RANK_THREADS, false, sizeof(TopShared)};
  if (device.has_clusters && has_cluster_code) {
    while (g.cluster < TOP_CLUSTER && g.cluster * RANK_WARPS * LEADER_COLUMNS < p.vocab) g.cluster *= 2;
  }
  return LaunchClusters(TopKernel, g, p.batch, false, stream, p);
}

}  // namespace flashinfer
