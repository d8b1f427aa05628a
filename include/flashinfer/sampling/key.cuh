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

/// SIGNED: columns are any floats, to be ranked; otherwise weights, of which only positive ones count.
template <bool SIGNED, bool RESIDENT, typename T>
__device__ __forceinline__ uint32_t KeyOf(const Slice<RESIDENT, T>& slice, float x) {
  if constexpr (SIGNED) return OrderedKey(x);
  return Bits(Positive(x));
}

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

/// The key in [low, high] that `wanted` ends at, or `low` if all of them are wanted; by one block. `count` and `quanta`
/// are what is above `high`. FEW: at most 65536 keys, whose quanta are added up by halves, each in 32 bits, which
/// shared memory is fast at. `listed.ForEach(low, high, f)` calls f(key) of each key within, over the threads.
template <bool SIGNED, bool FEW, typename List>
__device__ __forceinline__ Found FindKey(const List& listed, uint32_t low, uint32_t high, uint64_t count,
                                         uint64_t quanta, const Wanted& wanted, const Scale& scale, Shared& shared) {
  uint32_t* const counts = shared.histogram;
  auto* const masses = reinterpret_cast<unsigned long long*>(shared.histogram + FINE_BINS);
  uint32_t *const low_halves = counts + FINE_BINS, *const high_halves = low_halves + FINE_BINS;
  const auto mass_of = [&](int bin) {
    return FEW ? low_halves[bin] + (uint64_t{high_halves[bin]} << 16) : uint64_t{masses[bin]};
  };
  constexpr int MOST = FINE_BINS / 256;
  const int mine = FINE_BINS / blockDim.x, first = threadIdx.x * mine;
  for (int turn = 0; turn < 4; ++turn) {  // 9 bits each
    const uint32_t range = high - low;
    const int shift = max(0, 32 - __clz(range) - FINE_BITS);
    for (int i = threadIdx.x; i < FINE_BINS; i += blockDim.x) counts[i] = 0, masses[i] = 0;
    if (threadIdx.x == 0) shared.first_bin = FINE_BINS;
    __syncthreads();
    listed.ForEach(low, high, [&](uint32_t key) {
      const uint32_t bin = (high - key) >> shift;
      atomicAdd(counts + bin, 1u);
      if constexpr (!SIGNED) {
        const uint32_t quantum = QuantumOf(FromBits(key), scale);
        if constexpr (FEW) {
          atomicAdd(low_halves + bin, quantum & 0xFFFFu);
          atomicAdd(high_halves + bin, quantum >> 16);
        } else {
          atomicAdd(masses + bin, static_cast<unsigned long long>(quantum));
        }
      }
    });
    __syncthreads();
    uint64_t sum[2] = {};
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      if (i < mine) sum[0] += counts[first + i], sum[1] += mass_of(first + i);
    }
    BlockExclusiveScan(sum, shared.scratch);
    sum[0] += count, sum[1] += quanta;
    uint64_t through[2] = {sum[0], sum[1]};
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      if (i < mine) {
        through[0] += counts[first + i], through[1] += mass_of(first + i);
        if (through[0] >= wanted.count || through[1] >= wanted.quanta)
          atomicMin(&shared.first_bin, uint32_t(first + i));
      }
    }
    __syncthreads();
    const uint32_t bin = min(shared.first_bin, uint32_t(range >> shift));  // all wanted: the lowest
    // What is above the bin becomes what is above the next bracket; its owner tells.
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      if (i < mine) {
        if (uint32_t(first + i) == bin) {
          shared.scratch[2][0] = sum[0], shared.scratch[2][1] = sum[1];
          shared.scratch[2][2] = sum[1] + mass_of(first + i);
        }
        sum[0] += counts[first + i], sum[1] += mass_of(first + i);
      }
    }
    __syncthreads();
    count = shared.scratch[2][0], quanta = shared.scratch[2][1];
    const uint64_t kept = shared.scratch[2][2];
    high -= bin << shift;
    if (shift == 0) return {high, kept};
    const uint32_t width = (uint32_t{1} << shift) - 1;
    if (high - low > width) low = high - width;
    __syncthreads();
  }
  return {low, quanta};  // not reached: 4 turns of 9 bits cover 32
}

}  // namespace sampling
}  // namespace flashinfer
