// SPDX-License-Identifier: Apache-2.0
// Exact threshold of top-k and top-p over a row of probabilities, by one block in a bounded number of steps:
//   1. columns are counted in bins of keys, 64 per octave, downwards from the largest;
//   2. the counts bracket the threshold. By count the bracket is one bin. By mass it may be a few: the weight of
//      a column is known to within the edges of its bin, which are 1.6 % apart;
//   3. columns within the bracket are listed, the quanta of those above are summed;
//   4. the threshold is found among the listed columns (key_search.cuh).
// Steps 1 and 3 iterate over the whole row, step 4 over some hundred columns, or over the row where more are in the
// bracket (for example ties).
#pragma once
#include "key_search.cuh"

namespace flashinfer {
namespace sampling {

constexpr int BIN_SHIFT = 17;
// Up to this many columns from the top down to the end of the bracket are all listed.
constexpr uint32_t OPEN_COUNT = 1024;

/// Step 2: set `shared.bracket`; visible after the next barrier.
__device__ __forceinline__ void FindBracket(uint32_t top, const Wanted& wanted, const Scale& scale,
                                            SelectShared& shared) {
  constexpr int MINE = BINS / SELECT_THREADS;  // bins per thread
  const int first = threadIdx.x * MINE;
  // For each bin: columns, and bounds of their quanta.
  const auto edge = [&](int bin) { return (int64_t(top) - (int64_t(bin) << BIN_SHIFT)); };
  const auto quantum = [&](int64_t key) { return key > 0 ? uint64_t(QuantumOf(FromBits(uint32_t(key)), scale)) : 0; };
  const auto least = [&](int bin) { return bin == BINS - 1 ? 0 : quantum(edge(bin + 1) + 1); };
  const auto most = [&](int bin) { return quantum(edge(bin)); };
  uint32_t count[MINE];
  uint64_t sum[3] = {};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    count[i] = shared.histogram[first + i];
    if (count[i] != 0) {
      sum[0] += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
    }
  }
  if (threadIdx.x == 0) shared.first_bin = shared.last_bin = BINS - 1;
  BlockExclusiveScan(sum, shared.scratch);
  uint64_t columns = sum[0];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (count[i] != 0) {
      columns += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
      if (columns >= wanted.count || sum[2] >= wanted.quanta) atomicMin(&shared.first_bin, uint32_t(first + i));
      if (columns >= wanted.count || sum[1] >= wanted.quanta) atomicMin(&shared.last_bin, uint32_t(first + i));
    }
  }
  __syncthreads();
  // The owner of the bracket's first bin knows the sums above it, the owner of the last bin the sums within.
  const int from = shared.first_bin, to = shared.last_bin;
  Bracket& bracket = shared.bracket;
  columns = sum[0];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (first + i == from) bracket.count_above = uint32_t(columns);
    columns += count[i];
    if (first + i == to) bracket.is_open = columns <= OPEN_COUNT;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (from == 0) bracket.is_open = 1;
    if (bracket.is_open) bracket.count_above = 0;
    bracket.high = bracket.is_open ? ~uint32_t{0} : uint32_t(edge(from));
    const int64_t low = to == BINS - 1 ? 0 : edge(to + 1) + 1;
    bracket.low = low < 1 ? 1 : uint32_t(low);
  }
}

/// Step 3. Returns true if the bracket contains more columns than the list can hold.
__device__ __forceinline__ bool SetAside(const Slice<false>& row, const Bracket& bracket, const Scale& scale,
                                         SelectShared& shared) {
  const volatile uint32_t& listed = shared.listed;
  uint64_t quanta = 0;
  row.ForEachGroup([&](int, float (&x)[4]) {
    uint32_t within = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = Positive(x[j]);
      const uint32_t key = Bits(x[j]);
      if (key > bracket.high) {
        quanta += QuantumOf(x[j], scale);
      } else if (key >= bracket.low) {
        within |= 1u << j;
      }
    }
    if (within != 0 && listed <= LIST) {  // the list has overflowed already
      uint32_t at = atomicAdd(&shared.listed, uint32_t(__popc(within)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (within >> j & 1) {
          if (at < LIST) shared.list[at] = Bits(x[j]);
          ++at;
        }
      }
    }
  });
  quanta = WarpSum(quanta);
  if (threadIdx.x % 32 == 0) shared.scratch[0][threadIdx.x / 32] = quanta;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < SELECT_THREADS / 32; ++w) quanta += shared.scratch[0][w];
    shared.quanta_above = quanta;
  }
  __syncthreads();
  return listed > LIST;
}

/// Keys in the list.
struct ListedKeys {
  const SelectShared& shared;

  /// Call f(key) for each key within [low, high].
  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t low, uint32_t high, const F& f) const {
    for (int i = threadIdx.x; i < int(shared.listed); i += SELECT_THREADS) {
      const uint32_t key = shared.list[i];
      if (key >= low && key <= high) f(key);
    }
  }
};

/// All keys of the row.
struct SliceKeys {
  const Slice<false>& row;

  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t low, uint32_t high, const F& f) const {
    row.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (key >= low && key <= high) f(key);
      }
    });
  }
};

/// Step 4 over the row, and a second search for top-p after top-k. Not inlined: rarely called.
__device__ __noinline__ uint32_t FindInRow(const Slice<false> row, const Bracket bracket, uint32_t top, Wanted wanted,
                                           bool top_k_first, float top_p, const Scale scale, SelectShared& shared) {
  const SliceKeys keys{row};
  KeyThreshold found = FindKey(keys, bracket.low, bracket.is_open ? top : bracket.high, bracket.count_above,
                               shared.quanta_above, wanted, scale, shared);
  if (top_k_first) {
    __syncthreads();
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
    found = FindKey(keys, found.key, top, 0, 0, wanted, scale, shared);
  }
  return found.key;
}

/// Return the key of the smallest kept column to every thread; `top` is the key of the largest. With `top_k_first`,
/// top_p applies to the columns that top-k keeps instead of the row.
__device__ __forceinline__ uint32_t FindThreshold(const Slice<false>& row, uint32_t top, int emax, Wanted wanted,
                                                  bool top_k_first, float top_p, SelectShared& shared) {
  const Scale scale(emax);
  uint32_t threshold = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) shared.histogram[i] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    row.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (key != 0) atomicAdd(shared.histogram + min((top - key) >> BIN_SHIFT, uint32_t(BINS - 1)), 1u);
      }
    });
    __syncthreads();
    FindBracket(top, wanted, scale, shared);
    __syncthreads();

    const Bracket bracket = shared.bracket;
    if (SetAside(row, bracket, scale, shared)) {
      const bool is_first = top_k_first && pass == 0;
      return max(threshold, FindInRow(row, bracket, top, wanted, is_first, top_p, scale, shared));
    }
    const uint32_t high = bracket.is_open ? max(top, bracket.low) : bracket.high;
    KeyThreshold found{bracket.low, 0};
    const int searches = top_k_first && bracket.is_open && pass == 0 ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) {  // all columns that top-k keeps are in the list
        wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
        __syncthreads();
      }
      found =
          FindKey(ListedKeys{shared}, found.key, high, bracket.count_above, shared.quanta_above, wanted, scale, shared);
    }
    threshold = max(threshold, found.key);
    if (!top_k_first || bracket.is_open || pass == 1) break;
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
    __syncthreads();  // all threads have read the result
  }
  return threshold;
}

}  // namespace sampling
}  // namespace flashinfer
