// SPDX-License-Identifier: Apache-2.0
// Filter of a row in one read, by a cluster of blocks that does not hold the row:
//   1. a sample gives bounds of the threshold (threshold_estimate_rows.cuh), the same in each block;
//   2. the row is read in chunks, and the columns that may be kept, the survivors, are listed;
//   3. the leading block finds the threshold among the survivors that are not certain to be kept, and the mass
//      of all kept columns;
//   4. the row is written.
// If a list is too short for the survivors of some chunks, these chunks are split: they are read again in steps 3
// and 4. If there are too many survivors for that, or the threshold is not among them: filter_rows_fallback.cuh.
// Shared memory: RowFilterShared, the survivors of each lane of each chunk as bits, the list position of each chunk,
// the list.
#pragma once
#include "../ptx/prefetch.cuh"
#include "../ptx/shared.cuh"
#include "../sampling.cuh"
#include "../warp.cuh"
#include "threshold_estimate_rows.cuh"
#include "threshold_search.cuh"

namespace flashinfer {
namespace sampling {

constexpr int FILTER_CHUNKS = 128;       // chunks of a block that leave space for a long list
constexpr int FILTER_BYTES = 56 * 1024;  // minimum shared memory of a block; four blocks fit an SM
constexpr int FILTER_PREFETCH = 2;       // cache lines that a thread prefetches
constexpr int UNSAMPLED = 512;           // rows of up to this many columns are listed as a whole
constexpr int SPLIT_AT_ONCE = 2;         // chunks that are loaded before the first one is used
// Minimum fraction of the survivors that is listed; below it the fine estimate is faster.
constexpr float LEAST_LISTED = 0.7f;
constexpr uint32_t SPLIT_CHUNK = 1u << 31;  // plus the number of the next split chunk: a linked list in `start`
constexpr uint32_t LAST_SPLIT = ~uint32_t{0};

struct RowFilterShared {
  union {
    BoundShared bound;
    TightShared tight;
    struct {
      ColumnSums above_of[CHUNK_WARPS], within_of[CHUNK_WARPS];  // one entry per warp
    };
    ListSearchShared rank;
  };
  // Sent by each block to all: its largest key, and whether its list overflowed.
  uint32_t largest_in[MAX_CLUSTER], overflow_in[MAX_CLUSTER];
  // Sent by each block to the leader: sums of survivors that are certain to be kept, and of the others.
  ColumnSums above_in[MAX_CLUSTER], within_in[MAX_CLUSTER];
  uint32_t pushed;  // survivors that other blocks appended to the leader's list
  // Sent by the leader to all blocks.
  uint32_t threshold, is_found;
  uint64_t mass;
  // Local to the block.
  uint32_t low, high, top;  // bounds of the threshold; largest key of the row
  uint32_t listed, largest, first_pushed;
  uint32_t room;   // capacity of the list that chunks may fill
  uint32_t split;  // first of the chunks that did not fit; each links to the next
  // Used where not all survivors are listed: sums of those that are certain to be kept, and of the others in split
  // chunks; number of ties in this block and in each block.
  ColumnSums certain, uncertain;
  CertainShared sums;
  uint32_t tied, tied_in[MAX_CLUSTER];
  // Exchanged by a pair of blocks (filter_rows_launch.cuh) about their rows: bounds, whether the survivors can be
  // listed, whether the row is written.
  Bounds bounds[2];
  uint32_t can_list[2], is_written[2];
};

template <typename T, bool SIGNED, typename GROUP = Cluster>
struct RowFilter {
  const RowParams<T>& p;
  const int row;
  const RowChunks<T, SIGNED, GROUP> chunks;
  RowFilterShared& shared;
  uint32_t *const taken, *const start, *const list;
  const int capacity;

  static constexpr uint32_t LOWEST = SIGNED ? 0 : 1;  // smallest key of a column that may be kept

  __device__ __forceinline__ RowFilter(const RowParams<T>& p, int row, unsigned char* memory)
      : p(p),
        row(row),
        chunks(p, row),
        shared(*reinterpret_cast<RowFilterShared*>(memory)),
        taken(reinterpret_cast<uint32_t*>(memory + sizeof(RowFilterShared))),
        start(taken + chunks.most * 32),
        list(start + chunks.most),
        capacity((int(ptx::DynamicSharedBytes()) - int(sizeof(RowFilterShared))) / 4 - chunks.most * 33) {}

  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

  /// Prefetch the first columns of the block while the sample is evaluated.
  __device__ __forceinline__ void Prefetch() const {
    constexpr int COLUMNS = 128 / sizeof(T);  // columns per cache line
    const int end = min((chunks.first + chunks.count) * CHUNK, chunks.vocab);
    if (chunks.most > FILTER_PREFETCH * 128 * CHUNK_THREADS / int(CHUNK * sizeof(T)))
      return;  // long slices: prefetching does not help
#pragma unroll
    for (int i = 0; i < FILTER_PREFETCH; ++i) {
      const int column = chunks.first * CHUNK + (i * CHUNK_THREADS + int(threadIdx.x)) * COLUMNS;
      if (column < end) ptx::PrefetchL2(chunks.input + column);
    }
  }

  /// List the survivors of a chunk, or split the chunk if they do not fit; `largest` is raised to this lane's largest
  /// key.
  __device__ __forceinline__ void List(int c, const float (&x)[CHUNK_VECTORS][4], uint32_t bits, uint32_t& largest) {
    const uint32_t mine = __popc(bits), through = WarpInclusiveScan(mine), all = __shfl_sync(0xffffffffu, through, 31);
    uint32_t at = 0;
    if (Lane() == 0) {
      if (all != 0) at = atomicAdd(&shared.listed, all);
      if (at + all > shared.room) atomicSub(&shared.listed, all), at = atomicExch(&shared.split, SPLIT_CHUNK + c);
      start[c] = at;
    }
    if (all == 0) return;
    at = __shfl_sync(0xffffffffu, at, 0);
    if (at >= SPLIT_CHUNK) return;
    at += through - mine;
#pragma unroll
    for (int j = 0; j < CHUNK_VECTORS; ++j) {
      if (!__any_sync(0xffffffffu, bits >> (4 * j) & 15)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (bits >> (4 * j + e) & 1) {
          const uint32_t key = ColumnKey<SIGNED>(x[j][e]);
          if constexpr (SIGNED) largest = max(largest, key);
          list[at++] = key;
        }
      }
    }
  }

  /// Step 2: survivors are the columns from the key `low` on, and some NaN. Also finds the largest key: of all weights,
  /// or of the listed logits.
  __device__ __forceinline__ void Read(uint32_t low) {
    // The sign bit of a difference marks weights above `bound`, or logits below it. NaN counts as the largest logit and
    // as no weight: its differences have no sign.
    const float bound = ColumnOfKey<SIGNED>(SIGNED ? low : low - 1);
    float heaviest = 0.f;
    uint32_t largest = 0;
    chunks.ForEach([&](int c) {
      float x[CHUNK_VECTORS][4];
      const uint32_t valid = chunks.Load(c, x);
      uint32_t bits = 0;
#pragma unroll
      for (int i = CHUNK_COLUMNS - 1; i >= 0; --i) {
        const float value = x[i / 4][i % 4];
        bits = __funnelshift_l(Bits(SIGNED ? value - bound : bound - value), bits, 1);
        if constexpr (!SIGNED) heaviest = fmaxf(heaviest, value);
      }
      bits = (SIGNED ? ~bits : bits) & valid;
      taken[c * 32 + Lane()] = bits;
      List(c, x, bits, largest);
    });
    largest = ptx::ReduceMax(SIGNED ? largest : Bits(heaviest));
    if (Lane() == 0) atomicMax(&shared.largest, largest);
  }

  /// Call f(column, x) for each group of four columns of split chunks, by all threads.
  template <typename F>
  __device__ __forceinline__ void ForEachSplit(const F& f) const {
    static_assert(CHUNK == 4 * CHUNK_THREADS);
#pragma unroll 1
    for (uint32_t split = shared.split; split != LAST_SPLIT;) {
      int columns[SPLIT_AT_ONCE];
      float x[SPLIT_AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < SPLIT_AT_ONCE; ++i) {
        columns[i] = chunks.vocab;  // no chunk: past the end of the row
        if (split != LAST_SPLIT) {
          columns[i] = (chunks.first + int(split - SPLIT_CHUNK)) * CHUNK + threadIdx.x * 4;
          split = start[split - SPLIT_CHUNK];
        }
        chunks.LoadFour(columns[i], x[i]);
      }
#pragma unroll
      for (int i = 0; i < SPLIT_AT_ONCE; ++i) f(columns[i], x[i]);
    }
  }

  /// Step 3 of split chunks: sum the survivors and send the uncertain ones to the leader's list.
  __device__ __forceinline__ void ReportSplitChunks() {
    const Scale scale(BiasedExponent(FromBits(shared.top)));
    const uint32_t low = shared.low, high = shared.high;
    uint32_t* const last = GROUP::InBlock(list, 0) + capacity - 1;
    ColumnSums above{}, within{};
    ForEachSplit([&](int, const float (&x)[4]) {
      uint32_t bits = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = Positive(x[e]);
        if (Bits(value) > high) {
          above.template Add<false>(value, scale);
        } else if (Bits(value) >= low) {
          within.template Add<false>(value, scale);
          bits |= 1u << e;
        }
      }
      const uint32_t mine = __popc(bits), through = WarpInclusiveScan(mine);
      uint32_t at = 0;
      if (Lane() == 31) at = atomicAdd(GROUP::InBlock(&shared.pushed, 0), through);
      at = __shfl_sync(0xffffffffu, at, 31) + through - mine;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (bits >> e & 1) {
          if (int(at) < capacity) last[-int(at)] = Bits(x[e]);
          ++at;
        }
      }
    });
    above.AddTo(shared.certain), within.AddTo(shared.uncertain);
  }

  /// First half of step 3: survivors within [low, high] are uncertain, those above are kept. Sends the leader the sums
  /// of both and the keys of the former. SPLIT: the latter are not listed.
  template <bool SPLIT>
  __device__ __forceinline__ void Report(uint32_t low, uint32_t high, const Scale& scale) {
    const int rank = GROUP::Rank(), warp = threadIdx.x / 32, listed = int(shared.listed);
    ColumnSums above{}, within{};
    const auto own = [&](int i) { return list[i]; };
    ForEachKey(listed, own, [&](uint32_t key) {
      if (key > high) {
        above.template Add<SIGNED>(FromBits(key), scale);
      } else if (key >= low) {
        within.template Add<SIGNED>(FromBits(key), scale);
      }
    });
    const uint32_t mine = uint32_t(within.count), through = WarpInclusiveScan(mine);
    within.count = __shfl_sync(0xffffffffu, through, 31);
    above.count = ptx::ReduceAdd(uint32_t(above.count));
    if constexpr (!SIGNED) {
      above.quanta = WarpSum(above.quanta), above.mass = WarpSum(above.mass), within.quanta = WarpSum(within.quanta);
    }
    if (Lane() == 0) shared.above_of[warp] = above, shared.within_of[warp] = within;
    __syncthreads();
    uint32_t before = 0;  // uncertain survivors of earlier warps
    above = within = {};
    for (int w = 0; w < CHUNK_WARPS; ++w) {
      if (w == warp) before = uint32_t(within.count);
      above = above + shared.above_of[w], within = within + shared.within_of[w];
    }
    if (threadIdx.x == 0) {
      if (rank != 0) shared.first_pushed = atomicAdd(GROUP::InBlock(&shared.pushed, 0), uint32_t(within.count));
      if constexpr (SPLIT) GROUP::InBlock(shared.tied_in, 0)[rank] = shared.tied;
      GROUP::InBlock(shared.above_in, 0)[rank] = above + shared.certain;
      GROUP::InBlock(shared.within_in, 0)[rank] = within + shared.uncertain;
    }
    if (rank == 0) return;  // the leader's own survivors are in its list already
    __syncthreads();
    // The leader's own survivors fill its list from the front, those of other blocks from the back.
    uint32_t at = shared.first_pushed + before + through - mine;
    uint32_t* const last = GROUP::InBlock(list, 0) + capacity - 1;
    ForEachKey(listed, own, [&](uint32_t key) {
      if (key < low || key > high) return;
      if (int(at) < capacity) last[-int(at)] = key;
      ++at;
    });
  }

  /// Second half of step 3, by the leader. `has_all`: no column below `low` can be kept.
  template <bool SPLIT>
  __device__ __forceinline__ void Decide(uint32_t low, uint32_t high, bool has_all, const RowLimits& wanted,
                                         const Scale& scale) {
    const int blocks = GROUP::Size(), listed = int(shared.listed), n = listed + int(shared.pushed);
    ColumnSums above{}, within{};
    for (int i = 0; i < blocks; ++i) above = above + shared.above_in[i], within = within + shared.within_in[i];
    ColumnSums all = above + within, ties{};
    const bool is_above = above.count >= wanted.count || above.quanta >= wanted.quanta;
    bool is_within = has_all || all.count >= wanted.count || all.quanta >= wanted.quanta, keeps_ties = false;
    if constexpr (SPLIT) {
      for (int i = 0; i < blocks; ++i) ties.count += shared.tied_in[i];
      if constexpr (!SIGNED) {
        ties.quanta = ties.count * QuantumOf(FromBits(low), scale);
        ties.mass = ties.count * ColumnMass(FromBits(low), scale);
      }
      keeps_ties = ties.count > 0 && all.count < wanted.count && all.quanta < wanted.quanta;
      if (keeps_ties) all = all + ties, is_within |= all.count >= wanted.count || all.quanta >= wanted.quanta;
    }
    const bool is_found = !is_above && is_within && (within.count > 0 || keeps_ties) && n <= capacity;
    uint32_t threshold = 0;
    uint64_t mass = 0;
    if (is_found) {
      const auto key_at = [&](int i) { return list[i < listed ? i : capacity - 1 - (i - listed)]; };
      const auto quantum_of = [&](uint32_t key) { return uint64_t(SIGNED ? 0 : QuantumOf(FromBits(key), scale)); };
      threshold = low;
      if (!keeps_ties) {
        threshold = FindListThreshold(n, uint32_t(within.count), key_at, quantum_of, {low, high}, above.count,
                                      above.quanta, {wanted.count, wanted.quanta}, shared.rank)
                        .key;
      }
      if constexpr (!SIGNED) {
        ForEachKey(n, key_at, [&](uint32_t key) {
          if (key >= threshold && key <= high) mass += ColumnMass(FromBits(key), scale);
        });
        mass = WarpSum(mass);
        if (Lane() == 0) shared.rank.scratch[0][threadIdx.x / 32] = mass;
        __syncthreads();
        mass = above.mass + (keeps_ties ? ties.mass : 0);
        for (int w = 0; w < CHUNK_WARPS; ++w) mass += shared.rank.scratch[0][w];
      }
    }
    if (threadIdx.x < blocks) {
      *GROUP::InBlock(&shared.threshold, threadIdx.x) = threshold;
      *GROUP::InBlock(&shared.mass, threadIdx.x) = mass;
      *GROUP::InBlock(&shared.is_found, threadIdx.x) = is_found;
    }
  }

  /// Step 4: write the row.
  __device__ __forceinline__ void Write(const KeptColumns<SIGNED>& kept) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < int(shared.listed); i += CHUNK_THREADS) {
      list[i] = Bits(kept(ColumnOfKey<SIGNED>(list[i])));
    }
    __syncthreads();
    chunks.ForEach([&](int c) {
      uint32_t at = start[c];
      if (!SIGNED && at >= SPLIT_CHUNK) return;
      const uint32_t bits = taken[c * 32 + Lane()], mine = __popc(bits);
      at += WarpInclusiveScan(mine) - mine;
      float x[CHUNK_VECTORS][4];
#pragma unroll
      for (int j = 0; j < CHUNK_VECTORS; ++j) {
        x[j][0] = x[j][1] = x[j][2] = x[j][3] = KeptColumns<SIGNED>::FILL;
        if (!__any_sync(0xffffffffu, bits >> (4 * j) & 15)) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (bits >> (4 * j + e) & 1) x[j][e] = FromBits(list[at++]);
        }
      }
      chunks.Store(c, x);
    });
  }

  /// Step 4 of split chunks.
  __device__ __forceinline__ void WriteSplitChunks() const {
    const KeptColumns<SIGNED> kept(shared.threshold, Scale(BiasedExponent(FromBits(shared.top))), shared.mass);
    ForEachSplit([&](int column, float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = kept(Positive(x[e]));
      chunks.StoreFour(column, x);
    });
  }

  /// Limits of the row in the form that the estimators take.
  struct Share {
    Limits limits;
    bool by_mass, is_limited;
    __device__ __forceinline__ float Count() const { return float(limits.wanted.count); }
    /// Fraction of the mass that need not be kept; negative: no such limit.
    __device__ __forceinline__ float Rest() const { return by_mass ? 1.f - limits.top_p : -1.f; }
  };
  __device__ __forceinline__ Share ShareOf() const {
    const Limits limits = LimitsOf(p.filter, row, chunks.vocab, ONE);
    const bool by_mass = !SIGNED && limits.wanted.quanta != UNLIMITED;
    return {limits, by_mass, by_mass || limits.wanted.count != ~uint32_t{0}};
  }

  /// Exact limits, once the exponent of the largest column is known.
  __device__ __forceinline__ RowLimits RowLimitsOf(int emax) const {
    RowLimits wanted = LimitsOf(p.filter, row, chunks.vocab, emax).wanted;
    if (SIGNED) wanted.quanta = UNLIMITED;
    return wanted;
  }

  /// Number of survivors that a block lists before it splits chunks, 0 if there are too many: the leader's list must
  /// hold all uncertain survivors, with a margin over the estimate.
  __device__ __forceinline__ uint32_t RoomFor(const Bounds& bounds, int blocks) const {
    const float all = float(capacity), uncertain = 1.15f * (bounds.expected - bounds.certain);
    if (SIGNED) return bounds.expected <= 1.1f * all * float(blocks) ? capacity : 0;
    const float room = fminf((all - uncertain) * bounds.expected / fmaxf(bounds.certain, 1.f), 0.9375f * all);
    return room * float(blocks) >= LEAST_LISTED * bounds.expected ? uint32_t(fmaxf(room, 0.f)) : 0;
  }

  /// Return the key of the largest column to all blocks; `is_listed` becomes false if a block's list overflowed.
  template <bool SPLIT>
  __device__ __forceinline__ uint32_t Exchange(int blocks, bool& is_listed) const {
    if (threadIdx.x < blocks) {
      GROUP::InBlock(shared.largest_in, threadIdx.x)[GROUP::Rank()] = shared.largest;
      GROUP::InBlock(shared.overflow_in, threadIdx.x)[GROUP::Rank()] = (SIGNED || SPLIT) && shared.split != LAST_SPLIT;
    }
    GROUP::Sync();
    uint32_t largest = 0;
    for (int i = 0; i < blocks; ++i) {
      largest = max(largest, shared.largest_in[i]);
      if (shared.overflow_in[i]) is_listed = false;
    }
    return largest;
  }

  /// Step 1: estimate the bounds of the threshold.
  __device__ __forceinline__ Bounds FindBoundsOfRow() const {
    const Share share = ShareOf();
    if (!share.is_limited || chunks.vocab <= UNSAMPLED) return {{LOWEST, ~0u}, float(chunks.vocab), 0.f};
    const EstimateLimits wanted{share.Count(), share.Rest()};
    return FindBounds<SIGNED>(chunks.input, chunks.vocab, wanted, shared.bound, [&] { Prefetch(); });
  }

  /// Prepare step 2; returns false if there are too many survivors, or all columns are kept.
  __device__ __forceinline__ bool TryReserve(const Bounds& bounds) {
    const uint32_t room = ShareOf().is_limited ? RoomFor(bounds, GROUP::Size()) : 0;
    if (threadIdx.x == 0) {
      shared.listed = shared.largest = shared.pushed = 0, shared.split = LAST_SPLIT, shared.room = room;
      shared.certain = shared.uncertain = {};
    }
    return room > 0;
  }

  /// Step 2; returns false if there are more survivors than expected.
  __device__ __forceinline__ bool TryRead(const Bounds& bounds) {
    const int blocks = GROUP::Size();
    GROUP::Arrive();
    __syncthreads();
    Read(bounds.low);
    GROUP::Wait();  // every block runs
    __syncthreads();
    bool is_listed = true;
    const uint32_t largest = Exchange<false>(blocks, is_listed);
    // Bounded by the largest key, which saves passes of the search.
    if (threadIdx.x == 0) {
      shared.low = bounds.low, shared.high = max(min(bounds.high, largest), bounds.low), shared.top = largest;
    }
    __syncthreads();
    return is_listed;
  }

  /// Steps 3 and 4 without split chunks; returns false if the threshold is not among the survivors.
  __device__ __forceinline__ bool TryWrite() {
    const uint32_t low = shared.low, high = shared.high;
    const int emax = SIGNED ? ONE : BiasedExponent(FromBits(shared.top));
    const RowLimits wanted = RowLimitsOf(emax);
    const Scale scale(emax);
    Report<false>(low, high, scale);
    GROUP::Sync();
    // If the bounds start at the lowest key, all columns are among the survivors.
    if (GROUP::Rank() == 0) Decide<false>(low, high, low == LOWEST, wanted, scale);
    GROUP::Sync();
    if (!shared.is_found) return false;
    Write(KeptColumns<SIGNED>(shared.threshold, scale, shared.mass));
    return true;
  }
};

// Not inlined: rarely called, and registers are scarce.

template <typename T, typename GROUP>
__device__ __noinline__ void ReportSplitChunks(const RowParams<T>& p, int row, unsigned char* memory) {
  RowFilter<T, false, GROUP>(p, row, memory).ReportSplitChunks();
}

template <typename T, typename GROUP>
__device__ __noinline__ void WriteSplitChunks(const RowParams<T>& p, int row, unsigned char* memory) {
  RowFilter<T, false, GROUP>(p, row, memory).WriteSplitChunks();
}

/// Steps 2 to 4, after TryReserve has succeeded; returns false if there are more survivors than expected, or the
/// threshold is not among them.
template <typename T, bool SIGNED, typename GROUP>
__device__ __forceinline__ bool FilterRow(const RowParams<T>& p, int row, const Bounds& bounds, unsigned char* memory) {
  const RowFilterShared& shared = *reinterpret_cast<RowFilterShared*>(memory);
  if (!RowFilter<T, SIGNED, GROUP>(p, row, memory).TryRead(bounds)) return false;
  if (!SIGNED && shared.split != LAST_SPLIT) ReportSplitChunks<T, GROUP>(p, row, memory);
  if (!RowFilter<T, SIGNED, GROUP>(p, row, memory).TryWrite()) return false;
  if (!SIGNED && shared.split != LAST_SPLIT) WriteSplitChunks<T, GROUP>(p, row, memory);
  return true;
}

/// All steps; returns false if the row is left to filter_rows_fallback.cuh.
template <typename T, bool SIGNED, typename GROUP>
__device__ __forceinline__ bool FilterRow(const RowParams<T>& p, int row, unsigned char* memory) {
  RowFilter<T, SIGNED, GROUP> filter(p, row, memory);
  const Bounds bounds = filter.FindBoundsOfRow();
  return filter.TryReserve(bounds) && FilterRow<T, SIGNED, GROUP>(p, row, bounds, memory);
}

}  // namespace sampling
}  // namespace flashinfer
