// SPDX-License-Identifier: Apache-2.0
// Steps of topk.cuh that a block performs on a row: read it, sample it, gather candidates in shared memory, emit the
// selection.
#pragma once
#include "ptx/cluster.cuh"
#include "topk.h"
#include "topk_select.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace topk {

constexpr int GROUP_SIZE = 16;   // samples per group
constexpr int SAMPLE_BITS = 10;  // low bits of the sampled threshold that are not determined

/// Number of low bits of a key that carry no information, because the element type has fewer bits.
template <typename T>
inline constexpr int LOW_BITS = 0;
template <>
inline constexpr int LOW_BITS<__half> = 13;
template <>
inline constexpr int LOW_BITS<__nv_bfloat16> = 16;

/// Shared memory of a block: the scratch, then `capacity` keys and as many indices, then k permutation entries.
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

/// Call body(valid, vector, index of its first element) for the part of a row that block `part` reads, in whole warps.
/// Elements before the first and after the last 16-byte boundary are passed as vectors of one element. A thread loads
/// UNROLL vectors before it uses the first.
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

/// Estimate a threshold that somewhat more than k elements of the row reach, if the sample is representative. Each
/// thread takes the maximum of g samples. A fraction 1 - (1 - k / length)^g of the maxima is expected to be among the k
/// largest elements; the threshold is lower by four standard deviations of that count.
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
  if (want > blockDim.x) return INFINITY;  // the sample is too small for a threshold
  const uint32_t key = KeyOf(largest);
  uint32_t low = key, high = key;
  BlockRange(s, low, high);
  return FloatOf(FindCut(s, low, high, want, SAMPLE_BITS, [&](const auto& body) { body(true, key); }).low);
}

/// Gather the candidates of all blocks of the cluster in the first block, unless they exceed its capacity. Returns
/// their number.
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

/// Select by histograms of the row itself, without a sample. Works for any values.
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

/// Emit the selected elements directly from the row, by ascending index.
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

}  // namespace topk
}  // namespace flashinfer
