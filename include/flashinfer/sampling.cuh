// SPDX-License-Identifier: Apache-2.0
// Sampling on CUDA (definitions and parameters: sampling.h): what the kernels share. Where no threshold is searched,
// clusters read rows by segments and hold none, unless they are written again (softmax). Draws from probabilities guess
// the threshold, read rows once and list what is near the guess (of logits, softmax is taken first); rows that are
// filtered and written, all that may be kept.
// Entries and their kernels:
//   sampling/stream.cuh       tokens without a search: of all columns, of min-p
//   sampling/top.cuh          tokens of top-k and top-p, from probabilities
//   sampling/table.cuh        many tokens of few rows, which are prepared once
//   sampling/speculative.cuh  verification of drafted tokens
//   sampling/rows.cuh         rows of top-k and top-p: renormalised, masked
//   sampling/pairs.cuh        many rows of top-p
//   sampling/softmax.cuh      softmax
// What they are made of:
//   sampling/segment.cuh      a segment of a row in the registers of a warp: loaded, summed up, drawn from
//   sampling/pick.cuh         sums of segments; which segment a draw is from, and which column
//   sampling/walk.cuh         probabilities of many rows, read until the draw is found
//   sampling/min_p.cuh        min-p of many rows
//   sampling/top_kernel.cuh   the kernel of draws from top-k and top-p
//   sampling/near.cuh         a draw in one read: what is near the threshold is listed
//   sampling/guess.cuh        where the threshold most likely is, from a sample of the row
//   sampling/list.cuh         such lists, and draws from them
//   sampling/again.cuh        the same from rows that are flat or have many ties, where the guess was of no use
//   sampling/leader.cuh       draws by one block that reads the row again and again, where that does not do either
//   sampling/scan.cuh         running sums over a block
//   sampling/sieve.cuh        a row that is written, in one read: what may be kept is listed
//   sampling/bound.cuh        which columns these are, from a sample of the row
//   sampling/split.cuh        the same where that is too many, or wrong: only what is uncertain is listed
//   sampling/certain.cuh      sums of what is certain to be kept, before the largest column is known
//   sampling/tight.cuh        bounds from a closer look at the sample
//   sampling/rank.cuh         the threshold among them
//   sampling/seek.cuh         the threshold in the row, where the list is of no use
//   sampling/chunk.cuh        such a row: read and written by chunks
//   sampling/team.cuh         by the blocks of a cluster, or by one
//   sampling/row.cuh          a row of drafted tokens, held by a cluster
//   sampling/select.cuh       the threshold of a row of a table
//   sampling/key.cuh          a threshold among keys at hand, for sampling/select.cuh
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "ptx/pdl.cuh"
#include "sampling/row.cuh"

namespace flashinfer {
namespace sampling {

template <typename T>
__device__ __forceinline__ T ValueOf(const PerRow<T>& parameter, int64_t row) {
  if (parameter.values == nullptr) return parameter.value;
  return parameter.values[min(row, parameter.count - 1)];
}

__device__ __forceinline__ int64_t InputRow(const SampleParams& p, int64_t output) {
  if (p.indices == nullptr) return output;
  const int64_t row =
      p.wide ? static_cast<const int64_t*>(p.indices)[output] : static_cast<const int32_t*>(p.indices)[output];
  return min(max(row, int64_t{0}), p.rows - 1);  // an index out of range reads a wrong row, not memory of others
}

__device__ __forceinline__ void WriteToken(const SampleParams& p, int64_t output, int column) {
  const int token = max(column, 0);
  if (p.wide) {
    static_cast<int64_t*>(p.out)[output] = token;
  } else {
    static_cast<int32_t*>(p.out)[output] = token;
  }
  if (p.valid != nullptr) p.valid[output] = column >= 0;
}

/// Which columns to keep: those with fewer than `count` columns above them, and less than `quanta` quanta.
struct Wanted {
  uint32_t count;
  uint64_t quanta;
};

struct Limits {
  Wanted wanted;
  bool top_k_first;
  float top_p;
  __device__ __forceinline__ bool AnyOf() const {
    return wanted.count != ~uint32_t{0} || wanted.quanta != UNLIMITED || top_k_first;
  }
};

/// What a filter wants of a row, if its parameters are by row.
__device__ __forceinline__ Limits LimitsOf(const FilterParams& filter, int64_t row, int vocab, int emax) {
  const int top_k = ValueOf(filter.top_k, row);
  const float top_p = ValueOf(filter.top_p, row);
  Limits limits;
  limits.wanted.count = top_k >= vocab ? ~uint32_t{0} : uint32_t(max(top_k, 1));
  limits.top_k_first = filter.filter == Filter::kTopKFirst && !(top_p >= 1.f);
  limits.top_p = top_p;
  limits.wanted.quanta = filter.filter == Filter::kTopKFirst ? UNLIMITED : QuantaLimit(top_p, emax);
  return limits;
}

// ------------------------------------------------------------------------------------------------ launching

struct Geometry {
  int cluster, threads;
  bool is_resident;
  size_t shared_bytes;
};

/// What the launches of a kernel need to know of a device.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;
  bool has_clusters = false;  // and the kernel was compiled for SM90 or later: cluster instructions are not left out
};

/// Let KERNEL use as much shared memory as the device has, if it HOLDS_ROWS there. Done once per kernel and device.
template <auto KERNEL, bool HOLDS_ROWS = true>
cudaError_t PrepareKernel(Device& device) {
  static Device known[64];
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status == cudaSuccess && id >= 64) status = cudaErrorInvalidDevice;
  if (status != cudaSuccess) return status;
  if (known[id].multiprocessors == 0) {
    cudaFuncAttributes attributes;
    status = cudaFuncGetAttributes(&attributes, KERNEL);
    if (status != cudaSuccess) return status;
    int shared_bytes = 0, multiprocessors = 0;
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, id);
    if (status != cudaSuccess) return status;
    if (HOLDS_ROWS) {
      const int most = shared_bytes - int(attributes.sharedSizeBytes);
      status = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      if (status != cudaSuccess) return status;
      status = cudaFuncSetAttribute(KERNEL, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
      if (status != cudaSuccess) return status;
    }
    known[id].shared_bytes = shared_bytes;
    known[id].has_clusters = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
    known[id].multiprocessors = multiprocessors;
  }
  device = known[id];
  return cudaSuccess;
}

/// How to spread rows of `vocab` columns over blocks. The result does not depend on it.
inline Geometry GeometryOf(int64_t rows, int64_t vocab, const Device& device) {
  Geometry g{1, Threads(true), true, 0};
  const auto slice = [&] { return (CeilDiv(vocab, g.cluster) + 3) / 4 * 4; };
  if (device.has_clusters) {
    // At most 16K columns, so that three blocks share an SM; fewer while SMs would idle.
    while (g.cluster < MAX_CLUSTER &&
           (slice() > 16384 || (slice() > 2048 && rows * g.cluster < 2 * device.multiprocessors))) {
      g.cluster *= 2;
    }
  }
  g.shared_bytes = sizeof(RowShared) + slice() * sizeof(float);
  if (int64_t(g.shared_bytes) > device.shared_bytes) g = {1, Threads(false), false, sizeof(RowShared)};
  return g;
}

/// Blocks of the largest cluster that KERNEL, of so many threads and bytes for a block, can have: 16 where the device
/// allows more than 8, which are to be had on any. Asked once per kernel and device.
template <auto KERNEL>
int LargestCluster(int threads, size_t shared_bytes) {
  static int known[64];
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess || id >= 64) return MAX_CLUSTER;
  if (known[id] == 0) {
    const LaunchConfig launch(dim3(2 * MAX_CLUSTER), dim3(threads), shared_bytes, false, nullptr, 2 * MAX_CLUSTER);
    int clusters = 0;
    const bool allows_more =
        cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, KERNEL, &launch.config) == cudaSuccess && clusters > 0;
    if (!allows_more) cudaGetLastError();  // it is no error of ours
    known[id] = allows_more ? 2 * MAX_CLUSTER : MAX_CLUSTER;
  }
  return known[id];
}

/// One cluster for each of `rows`.
template <typename Params>
cudaError_t LaunchClusters(void (*kernel)(Params), const Geometry& g, int64_t rows, bool enable_pdl, Stream stream,
                           const Params& params) {
  if (rows * g.cluster > INT32_MAX) return cudaErrorInvalidValue;
  const LaunchConfig launch(dim3(unsigned(rows * g.cluster)), dim3(g.threads), g.shared_bytes, enable_pdl, stream,
                            g.cluster);
  return launch.Launch(kernel, params);
}

/// Launch RESIDENT, or STREAMING where no cluster can hold a row.
template <auto RESIDENT, auto STREAMING, typename Params>
cudaError_t LaunchRows(int64_t rows, int64_t vocab, bool enable_pdl, Stream stream, const Params& params) {
  Device device;
  const cudaError_t status = PrepareKernel<RESIDENT>(device);
  if (status != cudaSuccess) return status;
  const Geometry g = GeometryOf(rows, vocab, device);
  return LaunchClusters(g.is_resident ? RESIDENT : STREAMING, g, rows, enable_pdl, stream, params);
}

}  // namespace sampling
}  // namespace flashinfer
