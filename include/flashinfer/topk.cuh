// SPDX-License-Identifier: Apache-2.0
// The k largest elements of rows on CUDA (meaning and parameters: topk.h). One read of the input, so DRAM bound.
//
// A block (or a cluster of them, where there are few rows) takes a row:
//   1. sample      a threshold that a bit more than k elements should pass, from the maxima of small groups of samples
//   2. collect     read the row once and keep what passes in shared memory; blocks of a cluster send theirs to the first
//   3. select      the k largest of those, by histograms of adaptive range (topk_select.cuh)
//   4. emit        in any order, by index or by value
// A row whose sample misled (too few passed, or more than fit) is selected by histograms of the row itself, which reads
// it up to six times. A k for which shared memory is too small takes that way always, and lists by index.
//   test  pytest tests/topk      bench  python benchmarks/bench_topk.py
#pragma once
#include "ptx/pdl.cuh"
#include "topk_row.cuh"

namespace flashinfer {
namespace topk {

constexpr int MAX_THREADS = 512;

/// List the elements in this block's part of the row that are not below `threshold`. `s.count` may exceed the capacity.
template <typename T>
__device__ __forceinline__ void ListCandidates(const Shared& shared, uint32_t capacity, const T* data, int length,
                                               float threshold, uint32_t rank, uint32_t size) {
  ForEachVector<4>(data, length, int(rank), int(size), [&](bool valid, const auto& x, int index) {
    constexpr int N = sizeof(x) / sizeof(T);
    uint32_t hits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) hits |= uint32_t(!(ToFloat(x[i]) < threshold)) << i;  // NaN is a hit
    if (!valid || hits == 0) return;
    uint32_t at = atomicAdd(&shared.s.count, uint32_t(__popc(hits)));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((hits >> i & 1) == 0) continue;
      if (at < capacity) shared.keys[at] = KeyOf(ToFloat(x[i])), shared.indices[at] = uint32_t(index + i);
      ++at;
    }
  });
}

/// List exactly the selected elements of a row.
template <typename T>
__device__ __forceinline__ void ListChosen(const Shared& shared, const T* data, int length, const Selection& chosen) {
  Scratch& s = shared.s;
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  ForEachVector<2>(data, length, 0, 1, [&](bool valid, const auto& x, int index) {
#pragma unroll
    for (int i = 0; i < int(sizeof(x) / sizeof(T)); ++i) {
      const uint32_t key = KeyOf(ToFloat(x[i]));
      if (!valid || !chosen.Takes(key, uint32_t(index + i))) continue;
      const uint32_t at = atomicAdd(&s.count, 1u);
      shared.keys[at] = key, shared.indices[at] = uint32_t(index + i);
    }
  });
  __syncthreads();
}

/// Select the k largest of `count` candidates, where count > k.
template <typename T>
__device__ __forceinline__ Selection SelectFromList(const Shared& shared, const TopKParams<T>& p, uint32_t count, int k,
                                                    int length) {
  uint32_t low = ~uint32_t{0}, high = 0;
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    low = min(low, shared.keys[i]), high = max(high, shared.keys[i]);
  }
  BlockRange(shared.s, low, high);
  const auto for_each = [&](const auto& body) {
    for (uint32_t base = 0; base < count; base += blockDim.x) {
      const uint32_t i = base + threadIdx.x, at = min(i, count - 1);
      body(i < count, shared.keys[at], shared.indices[at]);
    }
  };
  return SelectLargest(shared.s, low, high, uint32_t(k), LOW_BITS<T>, length, p.prefer_large_indices, for_each);
}

template <typename T>
__global__ void __launch_bounds__(MAX_THREADS, 2) TopKKernel(const __grid_constant__ TopKParams<T> p) {
  extern __shared__ uint4 memory[];
  const Shared shared(memory, p.capacity);
  Scratch& s = shared.s;
  const uint32_t rank = ptx::ClusterRank(), size = ptx::ClusterSize();
  const int64_t row = blockIdx.x / size;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const TopKWindow window = WindowOf(p, row);
  const int length = window.length, k = min(p.k, length);
  const T* const data = p.input + row * p.row_stride + window.start;

  if (length <= p.k && p.order != TopKOrder::kByValue) {  // select all elements, in the order of the row
    for (int i = rank * blockDim.x + threadIdx.x; i < p.k; i += size * blockDim.x) {
      Emit(p, row, i, i < length ? i : -1, i < length ? data[i] : FromFloat<T>(0.f));
    }
    return;
  }
  if (k > p.capacity) {
    EmitFromRow(s, p, row, data, length, SelectFromRow(s, p, data, length, k));
    return;
  }

  if (threadIdx.x == 0) s.count = 0, s.taken = 0;
  if (size > 1) ptx::ClusterArrive();  // waited for before the first access to another block: all have started then
  __syncthreads();
  const float threshold = length <= p.capacity ? -INFINITY : SampleThreshold(s, data, length, k);
  const uint32_t capacity = p.capacity;
  ListCandidates(shared, capacity, data, length, threshold, rank, size);
  __syncthreads();
  uint32_t count = s.count;
  if (size > 1) {
    ptx::ClusterWait();
    count = GatherCandidates(shared, p.capacity, rank, size);
    if (rank != 0) return;
  }

  Selection chosen;
  if (count < uint32_t(k) || count > capacity) {
    chosen = SelectFromRow(s, p, data, length, k);
    ListChosen(shared, data, length, chosen);
    count = k;
  } else if (count > uint32_t(k)) {
    chosen = SelectFromList(shared, p, count, k, length);
  }
  EmitCandidates(shared, p, row, int(count), chosen);
}

/// Return the number of blocks per row: more than one if SMs would otherwise be idle and the rows are long enough.
inline int BlocksPerRow(int64_t rows, int width, int processors) {
  int blocks = 1;
  while (blocks < 8 && rows * blocks * 2 <= processors && width / (blocks * 2) >= 8192) blocks *= 2;
  return blocks;
}

/// Properties of the current device. Also raises the shared memory limit of the kernel to the maximum of the device.
struct Device {
  int processors = 0;
  bool has_clusters = false;  ///< the kernel was compiled for SM90 or later
  cudaError_t status = cudaSuccess;
};

template <typename T>
Device MakeDevice(int index) {
  Device device;
  int shared = 0;
  cudaFuncAttributes attributes{};
  const auto note = [&](cudaError_t status) { device.status = device.status != cudaSuccess ? device.status : status; };
  note(cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index));
  note(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  note(cudaFuncGetAttributes(&attributes, TopKKernel<T>));
  note(cudaFuncSetAttribute(TopKKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  note(cudaFuncSetAttribute(TopKKernel<T>, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  device.has_clusters = attributes.ptxVersion >= 90;
  return device;
}

/// Return what is known of the current device. Each thread asks for itself: <mutex> takes 0.7 s of each unit to parse.
template <typename T>
const Device& CurrentDevice() {
  constexpr int REMEMBERED = 16;
  static thread_local Device devices[REMEMBERED + 1];
  int index = 0;
  cudaGetDevice(&index);
  Device& device = devices[index < REMEMBERED ? index : REMEMBERED];
  if (device.processors == 0 || index >= REMEMBERED) device = MakeDevice<T>(index);
  return device;
}

}  // namespace topk

template <typename T>
Status TopK(const TopKParams<T>& params, Stream stream) {
  using namespace topk;
  if (params.rows == 0) return cudaSuccess;
  TopKParams<T> p = params;
  const int most = std::min(p.k, p.width);  // most elements that a row can yield
  p.capacity = p.capacity < most ? 0 : std::min(p.capacity, p.width);
  if (p.capacity == 0 && p.order == TopKOrder::kByValue) return cudaErrorInvalidValue;
  const Device& device = CurrentDevice<T>();
  if (device.status != cudaSuccess) return device.status;
  int blocks = p.blocks_per_row > 0 ? p.blocks_per_row : BlocksPerRow(p.rows, p.width, device.processors);
  if (!device.has_clusters || p.capacity == 0) blocks = 1;
  if (p.rows > INT32_MAX / blocks) return cudaErrorInvalidValue;
  // Four blocks of 256 fill a processor, and all rows of a large batch are in flight; a row alone is faster with 512.
  const int threads = p.k > 2048 || p.rows * blocks <= 2 * device.processors ? MAX_THREADS : MAX_THREADS / 2;
  return LaunchConfig(dim3(unsigned(p.rows * blocks)), dim3(threads), Shared::Bytes(p.capacity, most), p.enable_pdl,
                      stream, blocks)
      .Launch(TopKKernel<T>, p);
}

}  // namespace flashinfer
