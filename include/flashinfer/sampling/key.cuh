// SPDX-License-Identifier: Apache-2.0
// The key that a limit by count or by quanta ends at, among keys that a block has at hand: histograms of exact quanta,
// nine bits of the key a turn.
#pragma once
#include "row.cuh"

namespace flashinfer {
namespace sampling {

constexpr int FINE_BITS = 9, FINE_BINS = 1 << FINE_BITS;

/// Which columns to keep: those with fewer than `count` columns above them, and less than `quanta` quanta.
struct Wanted {
  uint32_t count;
  uint64_t quanta;
};

/// Exclusive prefix sums over the block, of N numbers at once.
template <int N>
__device__ __forceinline__ void BlockExclusiveScan(uint64_t (&x)[N], uint64_t (&scratch)[3][MAX_WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t through[N];
  __syncthreads();  // scratch may be in use
#pragma unroll
  for (int n = 0; n < N; ++n) {
    through[n] = WarpInclusiveScan(x[n]);
    if (lane == 31) scratch[n][warp] = through[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    uint64_t before = through[n] - x[n];
    for (int w = 0; w < warp; ++w) before += scratch[n][w];
    x[n] = before;
  }
}

struct Found {
  uint32_t key;          // the threshold
  uint64_t kept_quanta;  // of all columns at or above it
};

/// The key in [low, high] that `wanted` ends at, or `low` if all of them are wanted. `count` and `quanta` are what is
/// above `high`. By one block, or by all of a CLUSTER, each of which has keys of its own and gets the same result.
/// `keys.ForEach(low, high, f)` calls f(key) of each key within, over the threads.
template <bool CLUSTER, typename Keys>
__device__ __forceinline__ Found FindKey(const Keys& keys, uint32_t low, uint32_t high, uint64_t count, uint64_t quanta,
                                         const Wanted& wanted, const Scale& scale, Shared& shared) {
  constexpr int PARTS = 3, PART_BITS = 11;  // quanta are added up by parts, which MAX_VOCAB columns do not overflow
  static_assert(BINS >= (1 + PARTS) * FINE_BINS);
  uint32_t* const counts = shared.histogram;
  const auto sync = [] {
    if constexpr (CLUSTER) {
      ptx::ClusterSync();
    } else {
      __syncthreads();
    }
  };
  constexpr int MOST = FINE_BINS / 256;
  const int mine = FINE_BINS / blockDim.x, first = threadIdx.x * mine, blocks = CLUSTER ? ptx::ClusterSize() : 1;
  for (int turn = 0; turn < 4; ++turn) {  // 9 bits each
    const uint32_t range = high - low;
    const int shift = max(0, 32 - __clz(range) - FINE_BITS);
    for (int i = threadIdx.x; i < (1 + PARTS) * FINE_BINS; i += blockDim.x) counts[i] = 0;
    if (threadIdx.x == 0) shared.first_bin = FINE_BINS;
    __syncthreads();
    // Equal keys that follow each other are added at once: additions to one place are made one by one.
    uint32_t run_bin = 0, run_count = 0;
    uint64_t run_quanta = 0;
    const auto add = [&] {
      if (run_count == 0) return;
      atomicAdd(counts + run_bin, run_count);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const uint64_t rest = run_quanta >> (PART_BITS * part);
        const uint32_t units = uint32_t(part == PARTS - 1 ? rest : rest & ((1u << PART_BITS) - 1));
        atomicAdd(counts + (1 + part) * FINE_BINS + run_bin, units);
      }
    };
    keys.ForEach(low, high, [&](uint32_t key) {
      const uint32_t bin = (high - key) >> shift;
      if (bin != run_bin) {
        add();
        run_bin = bin, run_count = 0, run_quanta = 0;
      }
      ++run_count, run_quanta += QuantumOf(FromBits(key), scale);
    });
    add();
    sync();
    uint64_t columns[MOST] = {}, masses[MOST] = {}, sum[2] = {};
    for (int block = 0; block < blocks; ++block) {
      const uint32_t* const from = CLUSTER ? ptx::InBlock(counts, block) : counts;
#pragma unroll
      for (int i = 0; i < MOST; ++i) {
        if (i >= mine) continue;
        columns[i] += from[first + i];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          masses[i] += uint64_t{from[(1 + part) * FINE_BINS + first + i]} << (PART_BITS * part);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) sum[0] += columns[i], sum[1] += masses[i];
    BlockExclusiveScan(sum, shared.scratch);
    sum[0] += count, sum[1] += quanta;
    uint64_t through[2] = {sum[0], sum[1]};
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      if (i >= mine) continue;
      through[0] += columns[i], through[1] += masses[i];
      if (through[0] >= wanted.count || through[1] >= wanted.quanta) atomicMin(&shared.first_bin, uint32_t(first + i));
    }
    __syncthreads();
    const uint32_t bin = min(shared.first_bin, uint32_t(range >> shift));  // all wanted: the lowest
    // What is above the bin becomes what is above the next bracket; its owner tells.
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      if (i >= mine) continue;
      if (uint32_t(first + i) == bin) {
        shared.scratch[2][0] = sum[0], shared.scratch[2][1] = sum[1], shared.scratch[2][2] = sum[1] + masses[i];
      }
      sum[0] += columns[i], sum[1] += masses[i];
    }
    __syncthreads();
    count = shared.scratch[2][0], quanta = shared.scratch[2][1];
    const uint64_t kept = shared.scratch[2][2];
    high -= bin << shift;
    if (shift == 0) return {high, kept};
    const uint32_t width = (uint32_t{1} << shift) - 1;
    if (high - low > width) low = high - width;
    sync();
  }
  return {low, quanta};  // not reached: 4 turns of 9 bits cover 32
}

}  // namespace sampling
}  // namespace flashinfer
