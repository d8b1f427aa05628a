// SPDX-License-Identifier: Apache-2.0
// Exact searches for the threshold of a filter. Each counts the keys of a range in bins, finds the bin in which the
// limits are reached, and takes that bin as the next range. They differ in who searches where:
//   FindListThreshold   one block, in a list: few keys that are left are sorted
//   FindKey             one block, among any keys that it can iterate: ends with single keys
//   RowSearch           a cluster, in a row that it reads in each pass: recovers from ranges without the threshold
// Searches that stay where they are used: FindInList (candidate_list.cuh) scans counts and quanta packed in one number,
// because every token waits for it; ExactSampler (sample_exact.cuh) combines equal keys of a warp, because rows of few
// distinct values come there; topk_select.cuh has counts only.
#pragma once
#include "block_scan.cuh"
#include "row_chunks.cuh"

namespace flashinfer {
namespace sampling {

// ------------------------------------------------------------------------------------------------ in a list

// By one block of LIST_THREADS threads: histograms narrow the range until few keys are left, which are then sorted by
// counting the keys above each.

constexpr int LIST_THREADS = 256, LIST_WARPS = LIST_THREADS / 32;
constexpr int SORTED_KEYS = LIST_THREADS;  // keys that the last step sorts
constexpr int LIST_BITS = 8, LIST_BINS = 1 << LIST_BITS;
static_assert(LIST_BINS == LIST_THREADS);

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

/// Return the smallest kept key within the range among the keys key_at(i), i < n <= 65536, of which `within` are in the
/// range; each quantum is below 2^32. `count` and `quanta` are those of the columns above the range, which must contain
/// a key; the largest one is kept.
template <typename KeyAt, typename QuantumOfKey>
__device__ __forceinline__ KeyThreshold FindListThreshold(int n, uint32_t within, const KeyAt& key_at,
                                                          const QuantumOfKey& quantum_of, KeyRange range,
                                                          uint64_t count, uint64_t quanta, const FilterLimits& limits,
                                                          ListSearchShared& shared) {
  const int thread = threadIdx.x;
  for (int turn = 0; turn < 5 && within > SORTED_KEYS; ++turn) {
    const int shift = range.Shift(LIST_BITS);
    __syncthreads();
    shared.counts[thread] = shared.low_quanta[thread] = shared.high_quanta[thread] = 0;
    if (thread == 0) shared.bin = -1;
    __syncthreads();
    ForEachKey(n, key_at, [&](uint32_t key) {
      if (!range.Contains(key)) return;
      const uint32_t bin = range.Bin(key, shift);
      const uint64_t quantum = quantum_of(key);
      atomicAdd(shared.counts + bin, 1u);
      atomicAdd(shared.low_quanta + bin, uint32_t(quantum) & 0xFFFFu);
      atomicAdd(shared.high_quanta + bin, uint32_t(quantum >> 16));
    });
    __syncthreads();
    const uint32_t mine = shared.counts[thread];
    const uint64_t weight = shared.low_quanta[thread] + (uint64_t{shared.high_quanta[thread]} << 16);
    uint64_t columns = mine, before = weight;
    BlockExclusiveScan(columns, before, shared.scratch);
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
    range.Narrow(uint32_t(shared.bin), shift);
    if (shift == 0) return {range.high, shared.quanta_through};
  }
  __syncthreads();
  if (thread == 0) shared.listed = 0;
  shared.equal[thread] = 0;
  __syncthreads();
  ForEachKey(n, key_at, [&](uint32_t key) {
    if (range.Contains(key)) shared.keys[atomicAdd(&shared.listed, 1u)] = key;
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
  BlockExclusiveScan(before, unused, shared.scratch);
  before += quanta;
  const bool is_kept = thread < listed && before < limits.quanta && count + thread < limits.count;
  const uint32_t threshold = shared.sorted[max(__syncthreads_count(is_kept), 1) - 1];
  if (thread < listed && own == threshold && (thread + 1 == listed || shared.sorted[thread + 1] != threshold)) {
    shared.quanta_through = before + quantum;
  }
  __syncthreads();
  return {threshold, shared.quanta_through};
}

// ------------------------------------------------------------------------------------------------ by one block

// Histograms of exact quanta, nine bits of the key per pass, one bin per thread.

constexpr int SELECT_THREADS = 512;
constexpr int BINS = 2048;  // bins of the first histogram
constexpr int LIST = 768;   // capacity of the list of weights near the threshold
constexpr int FINE_BITS = 9, FINE_BINS = 1 << FINE_BITS;
static_assert(FINE_BINS == SELECT_THREADS && MAX_WARPS == SELECT_THREADS / 32);

/// Range of FindBracket (sample_many_per_row.cuh).
struct Bracket : KeyRange {
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

/// Return to every thread the smallest key in the range that `wanted` keeps, or its lower end if all keys are kept.
/// `count` and `quanta` are those of the columns above the range. `keys.ForEach(range, f)` calls f(key) for each key in
/// the range, spread over the threads.
template <typename Keys>
__device__ __forceinline__ KeyThreshold FindKey(const Keys& keys, KeyRange range, uint64_t count, uint64_t quanta,
                                                const RowLimits& wanted, const Scale& scale, SelectShared& shared) {
  constexpr int PARTS = 3, PART_BITS = 11;  // quanta are added in parts, which MAX_VOCAB columns cannot overflow
  static_assert(BINS >= (1 + PARTS) * FINE_BINS);
  uint32_t* const counts = shared.histogram;
  for (int turn = 0; turn < 4; ++turn) {  // 9 bits each
    const int shift = range.Shift(FINE_BITS);
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
    keys.ForEach(range, [&](uint32_t key) {
      const uint32_t bin = range.Bin(key, shift);
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
    const uint32_t bin = min(shared.first_bin, range.Bin(range.low, shift));  // the lowest bin if all keys are kept
    // Sums above this bin become the sums above the next bracket; the bin's owner publishes them.
    if (threadIdx.x == bin) {
      shared.scratch[2][0] = above[0], shared.scratch[2][1] = above[1], shared.scratch[2][2] = above[1] + mine_quanta;
    }
    __syncthreads();
    count = shared.scratch[2][0], quanta = shared.scratch[2][1];
    const uint64_t kept = shared.scratch[2][2];
    range.Narrow(bin, shift);
    if (shift == 0) return {range.high, kept};
    __syncthreads();
  }
  return {range.low, quanta};  // not reached: 4 passes of 9 bits cover 32 bits
}

// ------------------------------------------------------------------------------------------------ by a cluster

// The cluster reads the row repeatedly. In each pass, keys within a range are counted in bins; every block adds up the
// bins of all blocks and finds the bin that the filter ends in, which is the next range. A range that turns out not to
// contain the threshold is replaced by the one that does.

constexpr int SEARCH_BITS = 9, SEARCH_BINS = 1 << SEARCH_BITS, SEARCH_EACH = SEARCH_BINS / CHUNK_THREADS;
static_assert(SEARCH_EACH == 2 && CHUNK_WARPS >= MAX_CLUSTER);
// At most 8: two wrong ranges, four passes for a right one, one for the sum of all keys.
constexpr int SEARCH_TURNS = 10;

/// State of a search: the range, or the result.
struct SearchRange : KeyRange {
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
  const RowLimits wanted;
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

  template <typename Keys>
  __device__ __forceinline__ void Fill(const Keys& keys, const SearchRange& range, SearchShared::Turn& bins) const {
    const int shift = range.Shift(SEARCH_BITS);
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
      const uint32_t bin = range.Bin(key, shift);
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
    const int blocks = ptx::ClusterSize(), first = threadIdx.x * SEARCH_EACH, shift = range.Shift(SEARCH_BITS);
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
      return {{0, 0}, true, LOWEST, above.mass};  // all columns are kept
    } else if (above.count >= wanted.count || above.quanta >= wanted.quanta) {
      range.low = range.high + 1, range.high = largest;
    } else if (bin < SEARCH_BINS) {
      if (shift == 0) {  // each bin holds a single key
        uint64_t mass = 0;
        if constexpr (!SIGNED) {
#pragma unroll
          for (int i = 0; i < SEARCH_EACH; ++i) {
            if (first + i <= bin) mass += counts[i] * ColumnMass(key_of(first + i), scale);
          }
          mass = above.mass + BlockSum({0, 0, mass}).mass;
        }
        return {{0, 0}, true, range.high - uint32_t(bin), mass};
      }
      range.Narrow(uint32_t(bin), shift);
    } else if (range.low > LOWEST) {
      range.high = range.low - 1, range.low = LOWEST;
    } else if (SIGNED) {
      return {{0, 0}, true, LOWEST, 0};
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
