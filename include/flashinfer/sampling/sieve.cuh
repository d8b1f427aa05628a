// SPDX-License-Identifier: Apache-2.0
// A filter in one read of the row, by a cluster of blocks that does not hold the row:
//   1. a sample tells which columns may be kept (bound.cuh), the same in each block;
//   2. the row is read by chunks, and the columns that may be kept, the survivors, are listed;
//   3. the leading block finds the threshold among the survivors that are not certain to be kept, and the mass of all
//      that are kept;
//   4. the row is written.
// Where survivors are too many, or the threshold is not among them, the sample is looked at more closely (tight.cuh), only
// those survivors are listed that are not certain to be kept, or counted if they are ties, the others are added up, and
// the row is read again to be written. If that does not do either, the threshold is sought in the row (seek.cuh).
// Shared memory: SieveShared, survivors of each lane of each chunk as bits, where each chunk's are listed, the list.
#pragma once
#include "../ptx/prefetch.cuh"
#include "../sampling.cuh"
#include "../warp.cuh"
#include "bound.cuh"
#include "rank.cuh"
#include "seek.cuh"
#include "tight.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SIEVE_CHUNKS = 128;       // of a block, that leave room for a long list
constexpr int SIEVE_BYTES = 56 * 1024;  // of a block: four on an SM
constexpr int SIEVE_PREFETCH = 2;       // lines that a thread prefetches
constexpr int UNSAMPLED = 8192;         // rows of up to so many columns are listed as a whole
constexpr float SPLIT_DEVIATIONS = 3.5f;
constexpr float SPLIT_FILL = 0.9f;  // of the list: there may be more than a sample promises

struct SieveShared {
  union {
    BoundShared bound;
    TightShared tight;
    struct {
      ColumnSums above_of[CHUNK_WARPS], within_of[CHUNK_WARPS];  // by warp
    };
    RankShared rank;
  };
  // What each block tells all: its largest key, and whether its list is too short.
  uint32_t largest_in[MAX_CLUSTER], overflow_in[MAX_CLUSTER];
  // What each block tells the leader, of survivors that are certain to be kept and of the others.
  ColumnSums above_in[MAX_CLUSTER], within_in[MAX_CLUSTER];
  uint32_t pushed;  // survivors of other blocks that the leader has listed
  // What the leader tells all.
  uint32_t threshold, is_found;
  uint64_t mass;
  // For the block.
  uint32_t listed, largest, first_pushed;
  // Where not all survivors are listed: sums of those that are certain to be kept, and what these are relative to; how
  // many columns are ties, of the block and of each.
  ColumnSums certain;
  int32_t certain_emax;
  uint32_t tied, tied_in[MAX_CLUSTER];
};

static_assert(sizeof(SeekShared) <= SIEVE_BYTES);

/// Seek in the row, and write it. The blocks do not need anything else in `shared` any more.
template <typename T, bool SIGNED>
__device__ __noinline__ void SeekInRow(const RowParams<T>& p, int64_t row, const Seek<SIGNED> seek, SeekRange range) {
  const RowChunks<T, SIGNED> chunks(p, row);
  ptx::ClusterSync();
  if (!range.is_found) range = seek.Find(RowKeys<T, SIGNED>{chunks}, range);
  ptx::ClusterArrive();
  chunks.Copy(KeptColumns<SIGNED>(range.threshold, seek.scale, range.mass));
  ptx::ClusterWait();  // until others have read what this block has told them
}

/// Sums of the block's weights above `high`.
template <typename T>
__device__ __noinline__ void SumAbove(const RowParams<T>& p, int64_t row, uint32_t high, const Scale scale,
                                      ColumnSums& sums) {
  const RowChunks<T, false> chunks(p, row);
  if (threadIdx.x == 0) sums = {};
  __syncthreads();
  ColumnSums above{};
  RowKeys<T, false>{chunks}.ForEach([&](uint32_t key) {
    if (key > high) above.template Add<false>(FromBits(key), scale);
  });
  above.AddTo(sums);
  __syncthreads();
}

constexpr int SPLIT_MARGIN = 3;  // octaves that the largest column may be above any of the sample

/// What sums of the weights above the bounds are relative to: the exponent of the largest one of the sample, as that of
/// the row is not known yet. Larger where these weights are large enough for their quanta to be integers then: sums can
/// be shifted to the exponent of the row.
__device__ __forceinline__ int ExponentForSums(const TightBounds& bounds) {
  const int exponent = BiasedExponent(FromBits(bounds.largest)), least = BiasedExponent(FromBits(bounds.high));
  const bool is_exact = least + 8 >= exponent + SPLIT_MARGIN && exponent > 32 && exponent < 224;  // far from the limits
  return is_exact ? exponent + SPLIT_MARGIN : exponent;
}

template <typename T, bool SIGNED>
struct Sieve {
  const RowParams<T>& p;
  const int row;
  const RowChunks<T, SIGNED> chunks;
  SieveShared& shared;
  uint32_t *const taken, *const start, *const list;
  const int capacity;

  __device__ __forceinline__ Sieve(const RowParams<T>& p, int row, unsigned char* memory)
      : p(p),
        row(row),
        chunks(p, row),
        shared(*reinterpret_cast<SieveShared*>(memory)),
        taken(reinterpret_cast<uint32_t*>(memory + sizeof(SieveShared))),
        start(taken + chunks.most * 32),
        list(start + chunks.most),
        capacity((SIEVE_BYTES - int(sizeof(SieveShared))) / 4 - chunks.most * 33) {}

  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

  /// The first columns of the block, while the sample is looked at.
  __device__ __forceinline__ void Prefetch() const {
    constexpr int COLUMNS = 128 / sizeof(T);  // of a line
    const int end = min((chunks.first + chunks.count) * CHUNK, chunks.vocab);
    if (chunks.most > SIEVE_PREFETCH * 128 * CHUNK_THREADS / int(CHUNK * sizeof(T))) return;  // many rows: no use
#pragma unroll
    for (int i = 0; i < SIEVE_PREFETCH; ++i) {
      const int column = chunks.first * CHUNK + (i * CHUNK_THREADS + int(threadIdx.x)) * COLUMNS;
      if (column < end) ptx::PrefetchL2(chunks.input + column);
    }
  }

  /// List survivors of a chunk if there is room; `largest` is not below this lane's.
  __device__ __forceinline__ void List(int c, const float (&x)[CHUNK_VECTORS][4], uint32_t bits, uint32_t& largest) {
    const uint32_t mine = __popc(bits), through = WarpInclusiveScan(mine), all = __shfl_sync(0xffffffffu, through, 31);
    if (all == 0) return;
    uint32_t at = 0;
    if (Lane() == 0) start[c] = at = atomicAdd(&shared.listed, all);
    at = __shfl_sync(0xffffffffu, at, 0);
    if (int(at + all) > capacity) return;
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

  /// Step 2: survivors are the columns from the key `low` on, and some NaN. The largest key, too: of all weights, or of
  /// the logits that are listed.
  __device__ __forceinline__ void Read(uint32_t low) {
    // A difference has a sign where a weight is above `bound`, or where a logit is below. NaN is the largest of logits
    // and no weight: its differences have none.
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

  /// Step 2 where survivors are too many: those above the bounds are added up, the others are listed, unless they are
  /// equal to the lower one and ties. The largest key, too.
  __device__ __forceinline__ void ReadSplit(const TightBounds& bounds, bool is_listed) {
    const int emax = SIGNED ? ONE : ExponentForSums(bounds);
    const Scale scale(emax);
    if (threadIdx.x == 0) shared.certain_emax = emax;
    ColumnSums above{};
    uint32_t largest = 0, tied = 0;
    chunks.ForEach([&](int c) {
      float x[CHUNK_VECTORS][4];
      const uint32_t valid = chunks.Load(c, x);
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < CHUNK_COLUMNS; ++i) {
        const float value = SIGNED ? x[i / 4][i % 4] : Positive(x[i / 4][i % 4]);
        const uint32_t key = ColumnKey<SIGNED>(value);
        if (!(valid >> i & 1)) continue;
        largest = max(largest, key);
        if (key > bounds.high) {
          above.template Add<SIGNED>(value, scale);
        } else if (bounds.has_ties && key == bounds.low) {
          ++tied;
        } else if (key >= bounds.low) {
          bits |= 1u << i;
        }
      }
      if (is_listed) List(c, x, bits, largest);
    });
    largest = ptx::ReduceMax(largest), tied = ptx::ReduceAdd(tied);
    if (Lane() == 0) atomicMax(&shared.largest, largest), atomicAdd(&shared.tied, tied);
    above.AddTo(shared.certain);
  }

  /// Step 3, up to what the leader is told: survivors within [low, high] are uncertain, those above are kept. SPLIT: the
  /// latter are not listed.
  template <bool SPLIT>
  __device__ __forceinline__ void Report(uint32_t low, uint32_t high, const Scale& scale) {
    const int rank = ptx::ClusterRank(), warp = threadIdx.x / 32, listed = int(shared.listed);
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
    if constexpr (SPLIT) above = above + shared.certain;
    if (threadIdx.x == 0) {
      if constexpr (SPLIT) ptx::InBlock(shared.tied_in, 0)[rank] = shared.tied;
      ptx::InBlock(shared.above_in, 0)[rank] = above, ptx::InBlock(shared.within_in, 0)[rank] = within;
      if (rank != 0) shared.first_pushed = atomicAdd(ptx::InBlock(&shared.pushed, 0), uint32_t(within.count));
    }
    if (rank == 0) return;  // its list has them
    __syncthreads();
    // The leader's own come from the front of its list, those of others from the back.
    uint32_t at = shared.first_pushed + before + through - mine;
    uint32_t* const last = ptx::InBlock(list, 0) + capacity - 1;
    ForEachKey(listed, own, [&](uint32_t key) {
      if (key < low || key > high) return;
      if (int(at) < capacity) last[-int(at)] = key;
      ++at;
    });
  }

  /// The rest of step 3, by the leader. `has_all`: there is no column below `low` to keep.
  template <bool SPLIT>
  __device__ __forceinline__ void Decide(uint32_t low, uint32_t high, bool has_all, const Wanted& wanted,
                                         const Scale& scale) {
    const int blocks = ptx::ClusterSize(), listed = int(shared.listed), n = listed + int(shared.pushed);
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
        threshold = FindRanked(n, uint32_t(within.count), key_at, quantum_of, low, high, above.count, above.quanta,
                               {wanted.count, wanted.quanta}, shared.rank)
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
      *ptx::InBlock(&shared.threshold, threadIdx.x) = threshold;
      *ptx::InBlock(&shared.mass, threadIdx.x) = mass;
      *ptx::InBlock(&shared.is_found, threadIdx.x) = is_found;
    }
  }

  /// Step 4.
  __device__ __forceinline__ void Write(const KeptColumns<SIGNED>& kept) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < int(shared.listed); i += CHUNK_THREADS) {
      list[i] = Bits(kept(ColumnOfKey<SIGNED>(list[i])));
    }
    __syncthreads();
    chunks.ForEach([&](int c) {
      const uint32_t bits = taken[c * 32 + Lane()], mine = __popc(bits);
      uint32_t at = start[c] + WarpInclusiveScan(mine) - mine;
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

  /// What is asked of the row, in the terms of those who look at samples of it.
  struct Share {
    Limits limits;
    bool by_mass, is_limited;
    __device__ __forceinline__ float Count() const { return float(limits.wanted.count); }
    /// Of the mass, what need not be kept; negative: there is no such limit.
    __device__ __forceinline__ float Rest() const { return by_mass ? 1.f - limits.top_p : -1.f; }
  };
  __device__ __forceinline__ Share ShareOf() const {
    const Limits limits = LimitsOf(p.filter, row, chunks.vocab, ONE);
    const bool by_mass = !SIGNED && limits.wanted.quanta != UNLIMITED;
    return {limits, by_mass, by_mass || limits.wanted.count != ~uint32_t{0}};
  }

  /// The same exactly, once the largest column is known.
  __device__ __forceinline__ Wanted WantedOf(int emax) const {
    Wanted wanted = LimitsOf(p.filter, row, chunks.vocab, emax).wanted;
    if (SIGNED) wanted.quanta = UNLIMITED;
    return wanted;
  }

  /// The key of the largest column, and whether every block could list what it read. For all blocks.
  __device__ __forceinline__ uint32_t Exchange(int blocks, bool& is_listed) const {
    if (threadIdx.x < blocks) {
      ptx::InBlock(shared.largest_in, threadIdx.x)[ptx::ClusterRank()] = shared.largest;
      ptx::InBlock(shared.overflow_in, threadIdx.x)[ptx::ClusterRank()] = int(shared.listed) > capacity;
    }
    ptx::ClusterSync();
    uint32_t largest = 0;
    for (int i = 0; i < blocks; ++i) {
      largest = max(largest, shared.largest_in[i]);
      if (shared.overflow_in[i]) is_listed = false;
    }
    return largest;
  }

  /// All steps; false if they do not do.
  __device__ __forceinline__ bool IsDone() {
    const Share share = ShareOf();
    const int blocks = ptx::ClusterSize();
    if (threadIdx.x == 0) shared.listed = shared.largest = shared.pushed = 0;
    Bounds bounds{Seek<SIGNED>::LOWEST, ~0u, float(chunks.vocab)};
    if (share.is_limited && chunks.vocab > UNSAMPLED) {
      const BoundLimits wanted{share.Count(), share.Rest()};
      bounds = FindBounds<SIGNED>(chunks.input, chunks.vocab, wanted, shared.bound, [&] { Prefetch(); });
    }
    if (!share.is_limited || bounds.expected > 1.1f * float(capacity) * float(blocks)) return false;
    ptx::ClusterArrive();
    __syncthreads();
    Read(bounds.low);
    ptx::ClusterWait();  // every block runs
    __syncthreads();
    bool is_listed = true;
    const uint32_t largest = Exchange(blocks, is_listed);
    const int emax = SIGNED ? ONE : BiasedExponent(FromBits(largest));
    const Wanted wanted = WantedOf(emax);
    const Scale scale(emax);
    // Not above the largest, for fewer turns of the search.
    const uint32_t high = max(min(bounds.high, largest), bounds.low);
    if (is_listed) {
      Report<false>(bounds.low, high, scale);
      ptx::ClusterSync();
      // From the lowest key on, all are among the survivors.
      if (ptx::ClusterRank() == 0) Decide<false>(bounds.low, high, bounds.low == Seek<SIGNED>::LOWEST, wanted, scale);
      ptx::ClusterSync();
      if (shared.is_found) {
        Write(KeptColumns<SIGNED>(shared.threshold, scale, shared.mass));
        return true;
      }
    }
    return false;
  }

  /// The same where the first bounds were of no use.
  __device__ __forceinline__ void Split() {
    const Share share = ShareOf();
    const int blocks = ptx::ClusterSize();
    const float room = SPLIT_FILL * float(capacity);
    ptx::ClusterSync();  // every block runs, and has read what it was told
    if (threadIdx.x == 0) shared.listed = shared.largest = shared.pushed = shared.tied = 0, shared.certain = {};
    TightBounds bounds{Seek<SIGNED>::LOWEST, ~0u, float(chunks.vocab), false, 0};
    if (share.is_limited && chunks.vocab > UNSAMPLED) {
      const TightLimits wanted{share.Count(), share.Rest(), 0.5f * room, SPLIT_DEVIATIONS};
      bounds = FindTightBounds<SIGNED>(chunks.input, chunks.vocab, wanted, shared.tight);
    }
    bool is_listed = share.is_limited && bounds.within <= room;
    __syncthreads();
    if (!SIGNED || is_listed) ReadSplit(bounds, is_listed);
    ptx::ClusterSync();
    uint32_t largest = Exchange(blocks, is_listed);
    const int emax = SIGNED ? ONE : BiasedExponent(FromBits(largest));
    const Wanted wanted = WantedOf(emax);
    if (SIGNED && !is_listed) largest = ~0u;
    const Scale scale(emax);
    const uint32_t high = max(min(bounds.high, largest), bounds.low);
    SeekRange range{bounds.low, high, false, 0, 0};
    if (is_listed) {
      if constexpr (!SIGNED) {  // the largest may not have been in the sample
        const int shift = shared.certain_emax - emax;
        if (shift < 0) SumAbove<T>(p, row, high, scale, shared.certain);
        if (shift > 0 && threadIdx.x == 0) shared.certain.quanta <<= shift, shared.certain.mass <<= shift;
      }
      Report<true>(bounds.low, high, scale);
      ptx::ClusterSync();
      if (ptx::ClusterRank() == 0) Decide<true>(bounds.low, high, bounds.low == Seek<SIGNED>::LOWEST, wanted, scale);
      ptx::ClusterSync();
      if (shared.is_found) range = {0, 0, true, shared.threshold, shared.mass};
    }
    if (!share.is_limited) range = {0, 0, SIGNED, 0, 0};
    const Seek<SIGNED> seek{scale, wanted, SIGNED ? ~0u : largest, *reinterpret_cast<SeekShared*>(&shared)};
    SeekInRow<T, SIGNED>(p, row, seek, range);
  }
};

/// Not inlined: it is rare, and registers are few.
template <typename T, bool SIGNED>
__device__ __noinline__ void SplitRow(const RowParams<T>& p, int row, unsigned char* memory) {
  Sieve<T, SIGNED>(p, row, memory).Split();
}

}  // namespace sampling
}  // namespace flashinfer
