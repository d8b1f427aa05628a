// SPDX-License-Identifier: Apache-2.0
// Exact threshold search among keys that a block can iterate: histograms of exact quanta, nine bits of the key per
// pass, one bin per thread. Used by table_threshold.cuh.
#pragma once
#include "../sampling.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SELECT_THREADS = 512;
constexpr int BINS = 2048;  // bins of the first histogram
constexpr int LIST = 768;   // capacity of the list of weights near the threshold
constexpr int FINE_BITS = 9, FINE_BINS = 1 << FINE_BITS;
static_assert(FINE_BINS == SELECT_THREADS && MAX_WARPS == SELECT_THREADS / 32);

/// State of a search: keys in [low, high] contain the threshold.
struct Bracket {
  uint32_t low, high;
  uint32_t count_above;  // columns above `high`
  uint32_t is_open;      // nothing is above `high`
};

struct SelectShared {
  uint64_t scratch[3][MAX_WARPS];
  uint64_t quanta_above;  // quanta of the columns above the bracket
  Bracket bracket;
  uint32_t first_bin, last_bin;
  uint32_t listed;  // columns inside the bracket, of which the first LIST are in `list`
  alignas(16) uint32_t histogram[BINS];
  uint32_t list[LIST];
};

/// Return to every thread the smallest key in [low, high] that `wanted` keeps, or `low` if it keeps all of them.
/// `count` and `quanta` are those of the columns above `high`. `keys.ForEach(low, high, f)` calls f(key) for each key
/// in the range, spread over the threads.
template <typename Keys>
__device__ __forceinline__ KeyThreshold FindKey(const Keys& keys, uint32_t low, uint32_t high, uint64_t count,
                                                uint64_t quanta, const Wanted& wanted, const Scale& scale,
                                                SelectShared& shared) {
  constexpr int PARTS = 3, PART_BITS = 11;  // quanta are added in parts, which MAX_VOCAB columns cannot overflow
  static_assert(BINS >= (1 + PARTS) * FINE_BINS);
  uint32_t* const counts = shared.histogram;
  for (int turn = 0; turn < 4; ++turn) {  // 9 bits each
    const uint32_t range = high - low;
    const int shift = max(0, 32 - __clz(range) - FINE_BITS);
    for (int i = threadIdx.x; i < (1 + PARTS) * FINE_BINS; i += SELECT_THREADS) counts[i] = 0;
    if (threadIdx.x == 0) shared.first_bin = FINE_BINS;
    __syncthreads();
    // Runs of equal keys are added with one atomic: atomics to one address are serialised.
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
    __syncthreads();
    const uint64_t mine = counts[threadIdx.x];
    uint64_t mine_quanta = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      mine_quanta += uint64_t{counts[(1 + part) * FINE_BINS + threadIdx.x]} << (PART_BITS * part);
    }
    uint64_t above[2] = {mine, mine_quanta};
    BlockExclusiveScan(above, shared.scratch);
    above[0] += count, above[1] += quanta;
    if (above[0] + mine >= wanted.count || above[1] + mine_quanta >= wanted.quanta) {
      atomicMin(&shared.first_bin, threadIdx.x);
    }
    __syncthreads();
    const uint32_t bin = min(shared.first_bin, range >> shift);  // the lowest bin if all keys are kept
    // Sums above this bin become the sums above the next bracket; the bin's owner publishes them.
    if (threadIdx.x == bin) {
      shared.scratch[2][0] = above[0], shared.scratch[2][1] = above[1], shared.scratch[2][2] = above[1] + mine_quanta;
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
  return {low, quanta};  // not reached: 4 passes of 9 bits cover 32 bits
}

}  // namespace sampling
}  // namespace flashinfer
