// SPDX-License-Identifier: Apache-2.0
// Threshold of a filter in a row that a cluster reads repeatedly. In each pass, keys within a range are counted in
// bins; every block adds up the bins of all blocks and finds the bin that the filter ends in, which is the next range.
// A range that turns out not to contain the threshold is replaced by the one that does.
#pragma once
#include "../sampling.cuh"
#include "row_chunks.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SEARCH_BITS = 9, SEARCH_BINS = 1 << SEARCH_BITS, SEARCH_EACH = SEARCH_BINS / CHUNK_THREADS;
static_assert(SEARCH_EACH == 2 && CHUNK_WARPS >= MAX_CLUSTER);
// At most 8: two wrong ranges, four passes for a right one, one for the sum of all keys.
constexpr int SEARCH_TURNS = 10;

/// State of a search: the range [low, high] of keys, or the result.
struct SearchRange {
  uint32_t low, high;
  bool is_found;
  uint32_t threshold;
  uint64_t mass;  // mass of all kept columns
};

struct SearchShared {
  struct Turn {
    alignas(8) uint32_t counts[SEARCH_BINS];
    uint32_t quanta[3][SEARCH_BINS];  // in parts of 11 bits, which MAX_VOCAB columns cannot overflow
    ColumnSums above;                 // sums of the block's keys above the range
    int32_t bin;                      // the bin that the filter ends in
  };
  Turn turns[2];                    // double buffer: a block may be one pass ahead of another
  ColumnSums by_warp[CHUNK_WARPS];  // sums by warp, or by block
  uint64_t scratch[3][MAX_WARPS];
};

/// Keys of a row, which is read in each pass.
template <typename T, bool SIGNED>
struct RowKeys {
  const RowChunks<T, SIGNED>& chunks;

  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
    chunks.ForEach([&](int c) {
      float x[CHUNK_VECTORS][4];
      const uint32_t valid = chunks.Load(c, x);
#pragma unroll
      for (int i = 0; i < CHUNK_COLUMNS; ++i) {
        const float value = SIGNED ? x[i / 4][i % 4] : Positive(x[i / 4][i % 4]);
        if (valid >> i & 1) f(ColumnKey<SIGNED>(value));
      }
    });
  }
};

template <bool SIGNED>
struct RowSearch {
  static constexpr uint32_t LOWEST = SIGNED ? 0 : 1;
  const Scale scale;
  const Wanted wanted;
  const uint32_t largest;  // upper bound of all keys
  SearchShared& shared;

  /// Return the sum over the block to every thread.
  __device__ __forceinline__ ColumnSums BlockSum(ColumnSums sums) const {
    sums = sums.OfWarp();
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.by_warp[threadIdx.x / 32] = sums;
    __syncthreads();
    sums = shared.by_warp[0];
    for (int w = 1; w < CHUNK_WARPS; ++w) sums = sums + shared.by_warp[w];
    return sums;
  }

  static __device__ __forceinline__ int ShiftOf(const SearchRange& range) {
    return max(0, 32 - __clz(range.high - range.low) - SEARCH_BITS);
  }

  template <typename Keys>
  __device__ __forceinline__ void Fill(const Keys& keys, const SearchRange& range, SearchShared::Turn& bins) const {
    const int shift = ShiftOf(range);
    for (int i = threadIdx.x; i < SEARCH_BINS; i += CHUNK_THREADS) {
      bins.counts[i] = bins.quanta[0][i] = bins.quanta[1][i] = bins.quanta[2][i] = 0;
    }
    if (threadIdx.x == 0) bins.bin = SEARCH_BINS;
    __syncthreads();
    ColumnSums above{};
    keys.ForEach([&](uint32_t key) {
      if (key < range.low) return;
      if (key > range.high) {
        above.template Add<SIGNED>(FromBits(key), scale);
        return;
      }
      const uint32_t bin = (range.high - key) >> shift;
      atomicAdd(bins.counts + bin, 1u);
      if (!SIGNED && shift > 0) {  // otherwise a bin holds a single key, whose quantum is known
        const uint32_t quantum = QuantumOf(FromBits(key), scale);
#pragma unroll
        for (int part = 0; part < 3; ++part) atomicAdd(bins.quanta[part] + bin, quantum >> (11 * part) & 2047u);
      }
    });
    above = BlockSum(above);
    if (threadIdx.x == 0) bins.above = above;
  }

  /// Return the next range, or the threshold.
  __device__ __forceinline__ SearchRange Next(SearchRange range, SearchShared::Turn& bins) const {
    const int blocks = ptx::ClusterSize(), first = threadIdx.x * SEARCH_EACH, shift = ShiftOf(range);
    const auto key_of = [&](int bin) { return FromBits(range.high - bin); };  // used where a bin holds a single key
    uint32_t counts[SEARCH_EACH] = {};
    uint64_t quanta[SEARCH_EACH] = {}, sums[2] = {};
    if (int(threadIdx.x) < blocks) shared.by_warp[threadIdx.x] = ptx::InBlock(&bins, threadIdx.x)->above;
#pragma unroll 4
    for (int block = 0; block < blocks; ++block) {
      const SearchShared::Turn* const from = ptx::InBlock(&bins, block);
      const auto two = [&](const uint32_t* of) { return reinterpret_cast<const uint2*>(of)[threadIdx.x]; };
      const uint2 columns = two(from->counts);
      counts[0] += columns.x, counts[1] += columns.y;
      if constexpr (!SIGNED) {
#pragma unroll
        for (int part = 0; part < 3; ++part) {
          const uint2 units = two(from->quanta[part]);
          quanta[0] += uint64_t{units.x} << (11 * part), quanta[1] += uint64_t{units.y} << (11 * part);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SEARCH_EACH; ++i) {
      if (!SIGNED && shift == 0) quanta[i] = uint64_t{counts[i]} * QuantumOf(key_of(first + i), scale);
      sums[0] += counts[i], sums[1] += quanta[i];
    }
    BlockExclusiveScan(sums, shared.scratch);
    ColumnSums above{};  // sums over the cluster
    for (int block = 0; block < blocks; ++block) above = above + shared.by_warp[block];
    sums[0] += above.count, sums[1] += above.quanta;
    int reached = SEARCH_BINS;
#pragma unroll
    for (int i = 0; i < SEARCH_EACH; ++i) {
      sums[0] += counts[i], sums[1] += quanta[i];
      const bool is_reached = counts[i] != 0 && (sums[0] >= wanted.count || sums[1] >= wanted.quanta);
      if (is_reached) reached = min(reached, first + i);
    }
    if (reached < SEARCH_BINS) atomicMin(&bins.bin, reached);
    __syncthreads();
    const int bin = bins.bin;
    if (!SIGNED && range.high == 0) {
      return {0, 0, true, LOWEST, above.mass};  // all columns are kept
    } else if (above.count >= wanted.count || above.quanta >= wanted.quanta) {
      range.low = range.high + 1, range.high = largest;
    } else if (bin < SEARCH_BINS) {
      const uint32_t high = range.high - (uint32_t(bin) << shift), width = (1u << shift) - 1;
      if (shift == 0) {  // each bin holds a single key
        uint64_t mass = 0;
        if constexpr (!SIGNED) {
#pragma unroll
          for (int i = 0; i < SEARCH_EACH; ++i) {
            if (first + i <= bin) mass += counts[i] * ColumnMass(key_of(first + i), scale);
          }
          mass = above.mass + BlockSum({0, 0, mass}).mass;
        }
        return {0, 0, true, high, mass};
      }
      range.high = high;
      if (high - range.low > width) range.low = high - width;
    } else if (range.low > LOWEST) {
      range.high = range.low - 1, range.low = LOWEST;
    } else if (SIGNED) {
      return {0, 0, true, LOWEST, 0};
    } else {
      range.low = range.high = 0;
    }
    return range;
  }

  /// Run all passes; called by all threads of the cluster.
  template <typename Keys>
  __device__ __forceinline__ SearchRange Find(const Keys& keys, SearchRange range) const {
#pragma unroll 1
    for (int turn = 0; turn < SEARCH_TURNS && !range.is_found; ++turn) {
      Fill(keys, range, shared.turns[turn % 2]);
      ptx::ClusterSync();
      range = Next(range, shared.turns[turn % 2]);
    }
    return range;
  }
};

}  // namespace sampling
}  // namespace flashinfer
