// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter in a row that a cluster of blocks reads again and again. Turn by turn, keys within a range
// are put into bins; every block adds up the bins of all and finds the one that the filter ends in, which is the next
// range. A range that does not hold the threshold is replaced by the one that does.
#pragma once
#include "../sampling.cuh"
#include "chunk.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SEEK_BITS = 9, SEEK_BINS = 1 << SEEK_BITS, SEEK_EACH = SEEK_BINS / CHUNK_THREADS;
static_assert(SEEK_EACH == 2 && CHUNK_WARPS >= MAX_CLUSTER);
constexpr int SEEK_TURNS = 10;  // 8 at most: two ranges that are wrong, four for a right one, what all keys weigh

/// Where a search stands: in keys from `low` to `high`, inclusive; or what it has found.
struct SeekRange {
  uint32_t low, high;
  bool is_found;
  uint32_t threshold;
  uint64_t mass;  // of all that is kept
};

struct SeekShared {
  struct Turn {
    alignas(8) uint32_t counts[SEEK_BINS];
    uint32_t quanta[3][SEEK_BINS];  // by 11 bits, which MAX_VOCAB columns do not overflow
    ColumnSums above;               // of the block's keys above the range
    int32_t bin;                    // that the filter ends in
  };
  Turn turns[2];                    // a block may be one turn ahead of another
  ColumnSums by_warp[CHUNK_WARPS];  // or by block
  uint64_t scratch[3][MAX_WARPS];
};

/// Keys of a row, which is read each time.
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
struct Seek {
  static constexpr uint32_t LOWEST = SIGNED ? 0 : 1;
  const Scale scale;
  const Wanted wanted;
  const uint32_t largest;  // not below any key
  SeekShared& shared;

  /// The sum over the block, to every thread.
  __device__ __forceinline__ ColumnSums BlockSum(ColumnSums sums) const {
    sums = sums.OfWarp();
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.by_warp[threadIdx.x / 32] = sums;
    __syncthreads();
    sums = shared.by_warp[0];
    for (int w = 1; w < CHUNK_WARPS; ++w) sums = sums + shared.by_warp[w];
    return sums;
  }

  static __device__ __forceinline__ int ShiftOf(const SeekRange& range) {
    return max(0, 32 - __clz(range.high - range.low) - SEEK_BITS);
  }

  template <typename Keys>
  __device__ __forceinline__ void Fill(const Keys& keys, const SeekRange& range, SeekShared::Turn& bins) const {
    const int shift = ShiftOf(range);
    for (int i = threadIdx.x; i < SEEK_BINS; i += CHUNK_THREADS) {
      bins.counts[i] = bins.quanta[0][i] = bins.quanta[1][i] = bins.quanta[2][i] = 0;
    }
    if (threadIdx.x == 0) bins.bin = SEEK_BINS;
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
      if (!SIGNED && shift > 0) {  // otherwise a bin is of one key
        const uint32_t quantum = QuantumOf(FromBits(key), scale);
#pragma unroll
        for (int part = 0; part < 3; ++part) atomicAdd(bins.quanta[part] + bin, quantum >> (11 * part) & 2047u);
      }
    });
    above = BlockSum(above);
    if (threadIdx.x == 0) bins.above = above;
  }

  /// The next range, or the threshold.
  __device__ __forceinline__ SeekRange Next(SeekRange range, SeekShared::Turn& bins) const {
    const int blocks = ptx::ClusterSize(), first = threadIdx.x * SEEK_EACH, shift = ShiftOf(range);
    const auto key_of = [&](int bin) { return FromBits(range.high - bin); };  // where bins are of one key
    uint32_t counts[SEEK_EACH] = {};
    uint64_t quanta[SEEK_EACH] = {}, sums[2] = {};
    if (int(threadIdx.x) < blocks) shared.by_warp[threadIdx.x] = ptx::InBlock(&bins, threadIdx.x)->above;
#pragma unroll 4
    for (int block = 0; block < blocks; ++block) {
      const SeekShared::Turn* const from = ptx::InBlock(&bins, block);
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
    for (int i = 0; i < SEEK_EACH; ++i) {
      if (!SIGNED && shift == 0) quanta[i] = uint64_t{counts[i]} * QuantumOf(key_of(first + i), scale);
      sums[0] += counts[i], sums[1] += quanta[i];
    }
    BlockExclusiveScan(sums, shared.scratch);
    ColumnSums above{};  // of the cluster
    for (int block = 0; block < blocks; ++block) above = above + shared.by_warp[block];
    sums[0] += above.count, sums[1] += above.quanta;
    int reached = SEEK_BINS;
#pragma unroll
    for (int i = 0; i < SEEK_EACH; ++i) {
      sums[0] += counts[i], sums[1] += quanta[i];
      const bool is_reached = counts[i] != 0 && (sums[0] >= wanted.count || sums[1] >= wanted.quanta);
      if (is_reached) reached = min(reached, first + i);
    }
    if (reached < SEEK_BINS) atomicMin(&bins.bin, reached);
    __syncthreads();
    const int bin = bins.bin;
    if (!SIGNED && range.high == 0) {
      return {0, 0, true, LOWEST, above.mass};  // all are kept
    } else if (above.count >= wanted.count || above.quanta >= wanted.quanta) {
      range.low = range.high + 1, range.high = largest;
    } else if (bin < SEEK_BINS) {
      const uint32_t high = range.high - (uint32_t(bin) << shift), width = (1u << shift) - 1;
      if (shift == 0) {  // bins are of one key
        uint64_t mass = 0;
        if constexpr (!SIGNED) {
#pragma unroll
          for (int i = 0; i < SEEK_EACH; ++i) {
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

  /// By all threads of the cluster.
  template <typename Keys>
  __device__ __forceinline__ SeekRange Find(const Keys& keys, SeekRange range) const {
#pragma unroll 1
    for (int turn = 0; turn < SEEK_TURNS && !range.is_found; ++turn) {
      Fill(keys, range, shared.turns[turn % 2]);
      ptx::ClusterSync();
      range = Next(range, shared.turns[turn % 2]);
    }
    return range;
  }
};

}  // namespace sampling
}  // namespace flashinfer
