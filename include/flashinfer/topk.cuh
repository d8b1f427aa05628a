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
#include <mutex>

#include "ptx/cluster.cuh"
#include "topk.h"
#include "topk_select.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace topk {

constexpr int MAX_THREADS = 512;
constexpr int GROUP_SIZE = 16;   // samples of a group
constexpr int SAMPLE_BITS = 10;  // last bits of the sampled threshold that do not matter

/// Last bits of a key that say nothing, because the element type has fewer.
template <typename T>
inline constexpr int LOW_BITS = 0;
template <>
inline constexpr int LOW_BITS<__half> = 13;
template <>
inline constexpr int LOW_BITS<__nv_bfloat16> = 16;

/// A block's shared memory: the scratch, then `capacity` keys and as many indices, then a place for each of the k.
struct Shared {
  Scratch& s;
  uint32_t *keys, *indices;
  uint16_t* perm;

  __device__ __forceinline__ Shared(void* memory, int capacity)
      : s(*static_cast<Scratch*>(memory)),
        keys(reinterpret_cast<uint32_t*>(static_cast<Scratch*>(memory) + 1)),
        indices(keys + capacity),
        perm(reinterpret_cast<uint16_t*>(indices + capacity)) {}

  static size_t Bytes(int capacity, int k) {
    return sizeof(Scratch) + (capacity == 0 ? 0 : capacity * 2 * sizeof(uint32_t) + k * sizeof(uint16_t));
  }
};

/// body(valid, vector, index of its first element) over the share of block `part` of a row, in whole warps. What lies
/// before the first and after the last 16-byte boundary comes as vectors of one element. A thread loads UNROLL vectors
/// before it uses the first.
template <int UNROLL, typename T, typename Body>
__device__ __forceinline__ void ForEachVector(const T* row, int length, int part, int parts, const Body& body) {
  constexpr int VEC = 16 / sizeof(T);
  const int head = min(length, int((16 - (reinterpret_cast<uintptr_t>(row) & 15)) & 15) / int(sizeof(T)));
  const int vectors = (length - head) / VEC, tail = head + vectors * VEC;
  if (part == 0 && threadIdx.x < 32) {  // fewer than 16 elements
    const int lane = threadIdx.x, index = lane < head ? lane : tail + lane - head;
    const bool valid = index < length;
    body(valid, Vec<T, 1>::Load(row + (valid ? index : 0)), index);
  }
  if (vectors == 0) return;
  const T* const aligned = row + head;
  const int turn = blockDim.x * UNROLL;
  for (int first = part * turn; first < vectors; first += parts * turn) {
    Vec<T, VEC> x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = min(first + u * int(blockDim.x) + int(threadIdx.x), vectors - 1);
      x[u] = Vec<T, VEC>::Load(aligned + at * VEC);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = first + u * int(blockDim.x) + int(threadIdx.x);
      body(at < vectors, x[u], head + at * VEC);
    }
  }
}

/// A value that somewhat more than k elements of the row reach, if the row is no different where it was not sampled.
/// Each thread takes the maximum of g samples. Of the maxima a share 1 - (1 - k / length)^g should be among the k
/// largest elements; the threshold is as much below as four standard deviations of that number.
template <typename T>
__device__ __forceinline__ float SampleThreshold(Scratch& s, const T* row, int length, int k) {
  constexpr int VEC = 16 / sizeof(T);
  const int head = int((16 - (reinterpret_cast<uintptr_t>(row) & 15)) & 15) / int(sizeof(T));
  const int vectors = (length - head) / VEC;
  const float share = float(k) / float(length);
  // Large groups would almost all have one of the k where k is a large share.
  constexpr int MOST = GROUP_SIZE / VEC;
  const int each = share < 0.08f ? MOST : 1, log_samples = __ffs(each * int(blockDim.x)) - 1;
  Vec<T, VEC> x[MOST];
#pragma unroll
  for (int u = 0; u < MOST; ++u) {
    // Pairs of vectors, which are a sector of DRAM, evenly over the row.
    const uint32_t sample = min(u, each - 1) * blockDim.x + threadIdx.x;
    const uint32_t at = uint32_t(uint64_t(sample / 2) * uint32_t(2 * vectors) >> log_samples) + sample % 2;
    x[u] = Vec<T, VEC>::Load(row + head + min(int(at), vectors - 1) * VEC);
  }
  float largest = -INFINITY;
#pragma unroll
  for (int u = 0; u < MOST; ++u) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) largest = fmaxf(largest, ToFloat(x[u][i]));
  }
  const float miss = exp2f(float(each * VEC) * log2f(1.f - share)), mean = float(blockDim.x) * (1.f - miss);
  const uint32_t want = uint32_t(mean + 4.f * sqrtf(mean * miss)) + 3;
  if (want > blockDim.x) return INFINITY;  // passed by too few
  const uint32_t key = KeyOf(largest);
  uint32_t low = key, high = key;
  BlockRange(s, low, high);
  return FloatOf(FindCut(s, low, high, want, SAMPLE_BITS, [&](const auto& body) { body(true, key); }).low);
}

/// The candidates of all blocks of the cluster to the first one, unless they do not fit. Returns how many there are.
__device__ __forceinline__ uint32_t GatherCandidates(const Shared& shared, int capacity, uint32_t rank, uint32_t size) {
  Scratch& s = shared.s;
  const uint32_t count = s.count;
  if (threadIdx.x < size) ptx::StoreShared(&s.cluster_counts[rank], threadIdx.x, count);
  ptx::ClusterArrive();
  ptx::ClusterWait();
  uint32_t before = 0, total = 0;
  for (uint32_t i = 0; i < size; ++i) {
    if (i < rank) before += s.cluster_counts[i];
    total += s.cluster_counts[i];
  }
  if (rank != 0 && total <= uint32_t(capacity)) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      ptx::StoreShared(shared.keys + before + i, 0, shared.keys[i]);
      ptx::StoreShared(shared.indices + before + i, 0, shared.indices[i]);
    }
  }
  ptx::ClusterArrive();
  ptx::ClusterWait();
  return total;
}

template <typename T>
__device__ __forceinline__ void Emit(const TopKParams<T>& p, int64_t row, int slot, int index, T value) {
  const int64_t at = row * p.k + slot;
  if (p.values != nullptr) p.values[at] = value;
  if (p.indices != nullptr) p.indices[at] = index;
  if (p.raw_indices != nullptr) p.raw_indices[at] = index;
  if (p.transformed != nullptr) p.transformed[at] = TransformIndex(p, row, index);
}

/// Selects by histograms of the row itself. Any value may be in it.
template <typename T>
__device__ __forceinline__ Selection SelectFromRow(Scratch& s, const TopKParams<T>& p, const T* row, int length,
                                                   int k) {
  return SelectLargest(s, 0u, NAN_KEY, uint32_t(k), LOW_BITS<T>, length, p.prefer_large_indices, [&](const auto& body) {
    ForEachVector<2>(row, length, 0, 1, [&](bool valid, const auto& x, int index) {
#pragma unroll
      for (int i = 0; i < int(sizeof(x) / sizeof(T)); ++i) body(valid, KeyOf(ToFloat(x[i])), uint32_t(index + i));
    });
  });
}

/// Emits what is selected straight from the row, by ascending index.
template <typename T>
__device__ __forceinline__ void EmitFromRow(Scratch& s, const TopKParams<T>& p, int64_t row, const T* data, int length,
                                            const Selection& chosen) {
  constexpr int EACH = 8;  // neighbouring elements of a thread
  uint32_t done = 0;
  for (int base = 0; base < length; base += int(blockDim.x) * EACH) {
    const int first = base + int(threadIdx.x) * EACH;
    uint32_t taken = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int index = first + i;
      if (index < length && chosen.Takes(KeyOf(ToFloat(data[index])), uint32_t(index))) taken |= 1u << i;
    }
    uint32_t slot = done + SumBefore(s, __popc(taken), total);
    done += total;
    for (; taken != 0; taken &= taken - 1) {
      const int index = first + __ffs(taken) - 1;
      Emit(p, row, int(slot++), index, data[index]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void EmitCandidates(const Shared& shared, const TopKParams<T>& p, int64_t row, int count,
                                               const Selection& chosen) {
  Scratch& s = shared.s;
  const auto takes = [&](int i) { return chosen.Takes(shared.keys[i], shared.indices[i]); };
  const auto emit = [&](int slot, int i) {
    Emit(p, row, slot, int(shared.indices[i]), FromFloat<T>(FloatOf(shared.keys[i])));
  };
  if (p.order == TopKOrder::kByIndex) {
    EmitInOrder(s, shared.perm, count, takes, [&](int i) { return uint64_t(shared.indices[i]) << 32; }, emit);
  } else if (p.order == TopKOrder::kByValue) {
    const auto order_of = [&](int i) { return uint64_t(~shared.keys[i]) << 32 | shared.indices[i]; };
    EmitInOrder(s, shared.perm, count, takes, order_of, emit);
  } else {
    for (int base = 0; base < count; base += blockDim.x) {
      const int i = base + int(threadIdx.x), lane = threadIdx.x % 32;
      const bool mine = i < count && takes(i);
      const uint32_t votes = __ballot_sync(ALL_LANES, mine);
      uint32_t slot = 0;
      if (lane == 0 && votes != 0) slot = atomicAdd(&s.taken, uint32_t(__popc(votes)));
      slot = __shfl_sync(ALL_LANES, slot, 0) + __popc(votes & ((1u << lane) - 1));
      if (mine) emit(int(slot), i);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(MAX_THREADS, 2) TopKKernel(const __grid_constant__ TopKParams<T> p) {
  extern __shared__ uint4 memory[];
  const Shared shared(memory, p.capacity);
  Scratch& s = shared.s;
  const uint32_t rank = ptx::ClusterRank(), size = ptx::ClusterSize();
  const int64_t row = blockIdx.x / size;
  const TopKWindow window = WindowOf(p, row);
  const int length = window.length, k = min(p.k, length);
  const T* const data = p.input + row * p.row_stride + window.start;

  if (length <= p.k && p.order != TopKOrder::kByValue) {  // all of them, as they come
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
  ForEachVector<4>(data, length, int(rank), int(size), [&](bool valid, const auto& x, int index) {
    constexpr int N = sizeof(x) / sizeof(T);
    uint32_t hits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) hits |= uint32_t(!(ToFloat(x[i]) < threshold)) << i;  // NaN is a hit
    if (!valid || hits == 0) return;
    uint32_t at = atomicAdd(&s.count, uint32_t(__popc(hits)));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((hits >> i & 1) == 0) continue;
      if (at < capacity) shared.keys[at] = KeyOf(ToFloat(x[i])), shared.indices[at] = uint32_t(index + i);
      ++at;
    }
  });
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
    count = k;
    __syncthreads();
  } else if (count > uint32_t(k)) {
    uint32_t low = ALL_LANES, high = 0;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      low = min(low, shared.keys[i]), high = max(high, shared.keys[i]);
    }
    BlockRange(s, low, high);
    const auto for_each = [&](const auto& body) {
      for (uint32_t base = 0; base < count; base += blockDim.x) {
        const uint32_t i = base + threadIdx.x, at = min(i, count - 1);
        body(i < count, shared.keys[at], shared.indices[at]);
      }
    };
    chosen = SelectLargest(s, low, high, uint32_t(k), LOW_BITS<T>, length, p.prefer_large_indices, for_each);
  }
  EmitCandidates(shared, p, row, int(count), chosen);
}

/// Blocks that share a row: as many as processors would otherwise be idle, and rows long enough to share.
inline int BlocksPerRow(int64_t rows, int width, int processors) {
  int blocks = 1;
  while (blocks < 8 && rows * blocks * 2 <= processors && width / (blocks * 2) >= 8192) blocks *= 2;
  return blocks;
}

/// What the launch needs to know of the current device, and the kernel's permission to use all its shared memory.
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

template <typename T>
const Device& CurrentDevice() {
  constexpr int REMEMBERED = 16;
  static std::once_flag once[REMEMBERED];
  static Device devices[REMEMBERED];
  int index = 0;
  cudaGetDevice(&index);
  if (index < REMEMBERED) {
    std::call_once(once[index], [index] { devices[index] = MakeDevice<T>(index); });
    return devices[index];
  }
  static thread_local Device other;
  return other = MakeDevice<T>(index);
}

}  // namespace topk

template <typename T>
Status TopK(const TopKParams<T>& params, Stream stream) {
  using namespace topk;
  if (params.rows == 0) return cudaSuccess;
  TopKParams<T> p = params;
  const int most = std::min(p.k, p.width);  // that a row can yield
  p.capacity = p.capacity < most ? 0 : std::min(p.capacity, p.width);
  if (p.capacity == 0 && p.order == TopKOrder::kByValue) return cudaErrorInvalidValue;
  const Device& device = CurrentDevice<T>();
  if (device.status != cudaSuccess) return device.status;
  int blocks = p.blocks_per_row > 0 ? p.blocks_per_row : BlocksPerRow(p.rows, p.width, device.processors);
  if (!device.has_clusters || p.capacity == 0) blocks = 1;
  if (p.rows > INT32_MAX / blocks) return cudaErrorInvalidValue;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(p.rows * blocks));
  // Four blocks of 256 fill a processor, and all rows of a large batch are in flight; a row alone is faster with 512.
  config.blockDim = dim3(p.k > 2048 || p.rows * blocks <= 2 * device.processors ? MAX_THREADS : MAX_THREADS / 2);
  config.dynamicSmemBytes = Shared::Bytes(p.capacity, most);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, TopKKernel<T>, p);
}

}  // namespace flashinfer
