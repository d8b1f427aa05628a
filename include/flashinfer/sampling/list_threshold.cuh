// SPDX-License-Identifier: Apache-2.0
// Threshold of a filter among listed columns, by one block of LIST_THREADS threads: histograms narrow the range until
// few keys are left, which are then sorted by counting the keys above each.
#pragma once
#include "../sampling.h"
#include "fixed_point.h"
#include "../utils.cuh"
#include "../warp.cuh"

namespace flashinfer {
namespace sampling {

constexpr int LIST_THREADS = 256, LIST_WARPS = LIST_THREADS / 32;
constexpr int SORTED_KEYS = LIST_THREADS;  // keys that the last step sorts
constexpr int LIST_BINS = LIST_THREADS;

struct ListSearchShared {
  union {
    struct {
      uint32_t counts[LIST_BINS], low_quanta[LIST_BINS], high_quanta[LIST_BINS];
    };
    struct {  // last step, when few keys are left
      alignas(16) uint32_t keys[SORTED_KEYS + 4];
      uint32_t sorted[SORTED_KEYS], equal[SORTED_KEYS];
    };
  };
  uint64_t scratch[2][LIST_WARPS];
  uint64_t count_before, quanta_before, quanta_through;
  uint32_t count_within, listed;
  int32_t bin;
};

/// Exclusive prefix sums of two numbers over the block.
__device__ __forceinline__ void ListScan(uint64_t& a, uint64_t& b, ListSearchShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t through_a = a, through_b = b;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below_a = __shfl_up_sync(ALL_LANES, through_a, offset),
                   below_b = __shfl_up_sync(ALL_LANES, through_b, offset);
    if (lane >= offset) through_a += below_a, through_b += below_b;
  }
  if (lane == 31) shared.scratch[0][warp] = through_a, shared.scratch[1][warp] = through_b;
  __syncthreads();
  a = through_a - a, b = through_b - b;
#pragma unroll
  for (int w = 0; w < LIST_WARPS; ++w) {
    if (w < warp) a += shared.scratch[0][w], b += shared.scratch[1][w];
  }
}

/// Call f(key) for each of the n keys key_at(i), spread over the threads: four keys are loaded before the first is
/// used.
template <typename KeyAt, typename F>
__device__ __forceinline__ void ForEachKey(int n, const KeyAt& key_at, const F& f) {
#pragma unroll 1
  for (int base = threadIdx.x; base < n; base += 4 * LIST_THREADS) {
    uint32_t keys[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) keys[j] = key_at(min(base + j * LIST_THREADS, n - 1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (base + j * LIST_THREADS < n) f(keys[j]);
    }
  }
}

/// Return the smallest kept key within [low, high] among the keys key_at(i), i < n <= 65536, of which `within` are in
/// the range; each quantum is below 2^32. `count` and `quanta` are those of the columns above `high`. The range must
/// contain a key; the largest one is kept.
template <typename KeyAt, typename QuantumOfKey>
__device__ __forceinline__ KeyThreshold FindListThreshold(int n, uint32_t within, const KeyAt& key_at,
                                                          const QuantumOfKey& quantum_of, uint32_t low, uint32_t high,
                                                          uint64_t count, uint64_t quanta, const FilterLimits& limits,
                                                          ListSearchShared& shared) {
  const int thread = threadIdx.x;
  for (int turn = 0; turn < 5 && within > SORTED_KEYS; ++turn) {
    const uint32_t range = high - low;
    const int shift = max(0, 24 - __clz(range));  // 8 bits
    __syncthreads();
    shared.counts[thread] = shared.low_quanta[thread] = shared.high_quanta[thread] = 0;
    if (thread == 0) shared.bin = -1;
    __syncthreads();
    ForEachKey(n, key_at, [&](uint32_t key) {
      if (key < low || key > high) return;
      const uint32_t bin = (high - key) >> shift;
      const uint64_t quantum = quantum_of(key);
      atomicAdd(shared.counts + bin, 1u);
      atomicAdd(shared.low_quanta + bin, uint32_t(quantum) & 0xFFFFu);
      atomicAdd(shared.high_quanta + bin, uint32_t(quantum >> 16));
    });
    __syncthreads();
    const uint32_t mine = shared.counts[thread];
    const uint64_t weight = shared.low_quanta[thread] + (uint64_t{shared.high_quanta[thread]} << 16);
    uint64_t columns = mine, before = weight;
    ListScan(columns, before, shared);
    columns += count, before += quanta;
    // The lowest bin with a key that is kept.
    const bool starts = mine != 0 && columns < limits.count && before < limits.quanta;
    if (starts) atomicMax(&shared.bin, thread);
    __syncthreads();
    if (thread == shared.bin) {
      shared.count_before = columns, shared.quanta_before = before, shared.quanta_through = before + weight;
      shared.count_within = mine;
    }
    __syncthreads();
    count = shared.count_before, quanta = shared.quanta_before, within = shared.count_within;
    high -= uint32_t(shared.bin) << shift;
    const uint32_t width = (1u << shift) - 1;
    if (high - low > width) low = high - width;
    if (shift == 0) return {high, shared.quanta_through};
  }
  __syncthreads();
  if (thread == 0) shared.listed = 0;
  shared.equal[thread] = 0;
  __syncthreads();
  ForEachKey(n, key_at, [&](uint32_t key) {
    if (key >= low && key <= high) shared.keys[atomicAdd(&shared.listed, 1u)] = key;
  });
  __syncthreads();
  const int listed = shared.listed;
  if (thread < 4) shared.keys[listed + thread] = 0;  // padding: above no key
  __syncthreads();
  int parts = 1;  // neighbouring lanes share a key, as many as there are spare threads
  while (parts < 32 && listed * parts * 2 <= LIST_THREADS) parts *= 2;
  const int mine = thread / parts;
  const uint32_t key = mine < listed ? shared.keys[mine] : ~uint32_t{0};
  uint32_t above = 0;
  for (int j = thread % parts * 4; j < listed; j += parts * 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(shared.keys + j);
    above += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
  }
  for (int offset = 1; offset < parts; offset *= 2) above += __shfl_xor_sync(ALL_LANES, above, offset);
  if (mine < listed && thread % parts == 0) shared.sorted[above + atomicAdd(shared.equal + above, 1u)] = key;
  __syncthreads();
  const uint32_t own = thread < listed ? shared.sorted[thread] : 0;
  const uint64_t quantum = thread < listed ? quantum_of(own) : 0;
  uint64_t before = quantum, unused = 0;
  ListScan(before, unused, shared);
  before += quanta;
  const bool is_kept = thread < listed && before < limits.quanta && count + thread < limits.count;
  const uint32_t threshold = shared.sorted[max(__syncthreads_count(is_kept), 1) - 1];
  if (thread < listed && own == threshold && (thread + 1 == listed || shared.sorted[thread + 1] != threshold)) {
    shared.quanta_through = before + quantum;
  }
  __syncthreads();
  return {threshold, shared.quanta_through};
}

}  // namespace sampling
}  // namespace flashinfer
