// SPDX-License-Identifier: Apache-2.0
// Sampling on CUDA (definitions and parameters: sampling.h): helpers that all kernels share. How the kernels work:
//   no threshold search   clusters read rows in segments and hold nothing of them (softmax holds rows to write them)
//   top-k, top-p tokens   the threshold is estimated from a sample, the row is read once, columns near the estimate are
//                         listed (for logits, softmax is computed first)
//   top-k, top-p rows     likewise, with a list of all columns that may be kept
// Entries and their kernels:
//   sampling/sample_unfiltered.cuh        tokens without a search: from all columns, or with min-p
//     sampling/sample_min_p.cuh           many rows with min-p
//   sampling/sample_top_k_top_p.cuh       tokens with top-k and top-p from probabilities
//     sampling/sample_one_pass.cuh        the kernel, and the common case: one read of the row
//     sampling/sample_retry.cuh           flat rows and rows with many ties
//     sampling/sample_exact.cuh           exact search by one block, the last resort
//   sampling/sample_many_per_row.cuh      many tokens of few rows, which are prepared once
//   sampling/speculative.cuh              verification of draft tokens
//   sampling/filter_rows_launch.cuh       rows of top-k and top-p: renormalised, masked; kernels and launch
//     sampling/filter_rows.cuh            the common case: one read of the row
//     sampling/filter_rows_fallback.cuh   rows with too many columns to list
//   sampling/softmax.cuh                  softmax
// Building blocks:
//   sampling/fixed_point.h                weights, keys, masses, quanta
//   sampling/row_segments.cuh             a row that warps read in segments: sums, and the column of a unit of mass
//   sampling/row_chunks.cuh               a row that a group of blocks reads and writes in chunks
//   sampling/row_slices.cuh               a row of which each block owns one slice
//   sampling/block_scan.cuh               prefix sums over a block
//   sampling/candidate_list.cuh           columns near the threshold, and sampling from them
//   sampling/threshold_estimate.cuh       range of the threshold from a sample, for tokens
//   sampling/threshold_estimate_rows.cuh  bounds of the threshold from a sample, for rows: coarse, and fine
//   sampling/threshold_search.cuh         exact threshold in a list, among any keys by a block, in a row by a cluster
// On the CPU (sampling_cpu.h):
//   sampling/row_cpu.h                    a row of weights: sums of segments, and sampling
//   sampling/threshold_cpu.h              threshold of top-k and top-p
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
//   measurements  docs/performance/sampling.md
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "sampling.h"
#include "sampling/fixed_point.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"
#include "warp.cuh"

namespace flashinfer {
namespace sampling {

constexpr int WARP_COLUMNS = 128;  // columns that a warp loads at once, four per lane
constexpr int MAX_WARPS = 16;      // warps of a block that shares its sums, at most

template <typename T>
__device__ __forceinline__ T ValueOf(const PerRow<T>& parameter, int64_t row) {
  if (parameter.values == nullptr) return parameter.value;
  return parameter.values[min(row, parameter.count - 1)];
}

__device__ __forceinline__ int64_t InputRow(const SampleParams& p, int64_t output) {
  if (p.indices == nullptr) return output;
  const int64_t row =
      p.wide ? static_cast<const int64_t*>(p.indices)[output] : static_cast<const int32_t*>(p.indices)[output];
  return min(max(row, int64_t{0}), p.rows - 1);  // an invalid index reads a wrong row, never outside of the input
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

/// FilterLimits with a count of 32 bits, for exact searches over rows. With 64 bits, the fallback of filtered rows
/// spills up to 20 bytes more.
struct RowLimits {
  uint32_t count;
  uint64_t quanta;
};

struct Limits {
  RowLimits wanted;
  bool top_k_first;
  float top_p;
  __device__ __forceinline__ bool AnyOf() const {
    return wanted.count != ~uint32_t{0} || wanted.quanta != UNLIMITED || top_k_first;
  }
};

/// Return the limits of a filter for a row; parameters are indexed by row.
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

/// Closed range of keys that contains a threshold. Searches count keys in bins, downwards from `high`.
struct KeyRange {
  uint32_t low, high;

  __device__ __forceinline__ bool Contains(uint32_t key) const { return key >= low && key <= high; }
  /// Return the right shift of keys that divides the range into at most 2^bits bins.
  __device__ __forceinline__ int Shift(int bits) const { return max(0, 32 - bits - __clz(high - low)); }
  __device__ __forceinline__ uint32_t Bin(uint32_t key, int shift) const { return (high - key) >> shift; }
  /// Narrow the range to one of its bins.
  __device__ __forceinline__ void Narrow(uint32_t bin, int shift) {
    high -= bin << shift;
    const uint32_t width = (uint32_t{1} << shift) - 1;
    if (high - low > width) low = high - width;
  }
};

// ------------------------------------------------------------------------------------------------ launching

struct Geometry {
  int cluster, threads;
  bool is_resident;
  size_t shared_bytes;
};

/// Properties of a device that launches depend on.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;
  bool has_clusters = false;  // and the kernel was compiled for SM90 or later: cluster instructions are not left out
};

/// Allow KERNEL all shared memory of the device, if it HOLDS_ROWS there. Done once per kernel and device.
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

/// Return the largest cluster size of KERNEL with `threads` threads and `shared_bytes` per block: 16 if the device
/// supports it, otherwise 8, which every device with clusters supports. Queried once per kernel and device.
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
    if (!allows_more) cudaGetLastError();  // clear the error: the smaller cluster is used
    known[id] = allows_more ? 2 * MAX_CLUSTER : MAX_CLUSTER;
  }
  return known[id];
}

/// Launch one cluster per row.
template <typename Params>
cudaError_t LaunchClusters(void (*kernel)(Params), const Geometry& g, int64_t rows, bool enable_pdl, Stream stream,
                           const Params& params) {
  if (rows * g.cluster > INT32_MAX) return cudaErrorInvalidValue;
  const LaunchConfig launch(dim3(unsigned(rows * g.cluster)), dim3(g.threads), g.shared_bytes, enable_pdl, stream,
                            g.cluster);
  return launch.Launch(kernel, params);
}

}  // namespace sampling
}  // namespace flashinfer
