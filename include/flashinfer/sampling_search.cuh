// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter over a row held by a cluster (sampling_held.cuh), exact and in a bounded number of steps:
//   1. each block puts its columns into bins of keys, 16 to an octave: how many, and the mass to 2^-31. Every block
//      adds up the bins of all and brackets the threshold, mostly by one bin;
//   2. while the bracket holds more columns than block 0 can list: 256 bins of the bracket, with exact quanta;
//   3. every warp tells block 0 what it has above the bracket, and the groups with columns within;
//   4. block 0 sorts the latter by counting who is above whom, and adds them up.
// Columns that cannot be kept are left out of the first histogram: below as many columns of a block as top-k asks for,
// or together of less mass than top-p leaves.
#pragma once
#include "sampling_held.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

/// What a filter asks of a row.
struct Asked {
  uint32_t count;  // fewer columns than this are above one that is kept
  float top_p;
  bool by_count, by_mass;
  bool top_k_first;  // top_p is of the columns that top-k keeps
};

/// Where the search stands. Columns below `low` are dropped, those within [low, low + width) listed for block 0 to
/// decide, all above kept.
struct Bracket {
  uint32_t low, width;
  uint32_t count_above;
};

constexpr int BIN_SHIFT = 19;
constexpr uint32_t TOP = 0x3fffffffu;           // the first bin begins below 2, the last ends at 2^-31
constexpr uint32_t INFINITE_KEY = 0x7fffffffu;  // above all keys of weights
constexpr uint32_t SMALL = 0x3b800000u;         // SIGNED: 2^-8, below which there is one bin for each sign
constexpr float UNITS = 2147483648.f;           // of mass in the first histogram, in 1
constexpr uint32_t HEAVY = 1900;                // 1024ths of weight, in a block: below 2, at which masses overflow
constexpr uint32_t MOST = ~uint32_t{0};

template <bool SIGNED>
__device__ __forceinline__ int FirstBin(uint32_t key) {
  if constexpr (SIGNED) {
    const bool is_positive = key >> 31;
    const int magnitude = int(is_positive ? key ^ 0x80000000u : 0x7fffffffu - key);
    const int bin = min(max(magnitude - int(SMALL), 0) >> BIN_SHIFT, FIRST_BINS / 2 - 1);
    return is_positive ? FIRST_BINS / 2 - 1 - bin : FIRST_BINS / 2 + bin;
  } else {
    return min(max((int(TOP) - int(key)) >> BIN_SHIFT, 0), FIRST_BINS - 1);
  }
}

/// The smallest key of a bin.
template <bool SIGNED>
__device__ __forceinline__ uint32_t LowEdge(int bin) {
  if (bin == FIRST_BINS - 1) return SIGNED ? 0 : 1;
  if constexpr (SIGNED) {
    constexpr int HALF = FIRST_BINS / 2;
    if (bin < HALF)
      return bin == HALF - 1 ? 0x80000000u : 0x80000000u + SMALL + (uint32_t(HALF - 1 - bin) << BIN_SHIFT);
    return 0x80000000u - (SMALL + (uint32_t(bin - HALF + 1) << BIN_SHIFT));
  } else {
    return TOP + 1 - (uint32_t(bin + 1) << BIN_SHIFT);
  }
}

/// What a thread has found out about bins: where the limits are reached.
struct Reach {
  bool before, through;
};

template <bool SIGNED>
struct Search {
  const Slice& slice;
  const Asked& asked;
  Shared& shared;
  int vocab;
  Scale scale{ONE};
  int emax = ONE;
  uint32_t cutoff = 0;  // columns below are dropped for certain
  // What block 0 decides by. In two steps: by count, then by mass of what that keeps.
  uint32_t count_limit = MOST;
  uint64_t quanta_limit = UNLIMITED;
  bool in_two_steps = false;

  /// Step 1 up to the exchange: the largest column, the first histogram.
  __device__ __forceinline__ void Fill() {
    const int lane = threadIdx.x % 32;
    uint32_t largest = 0;
    slice.ForEach([&](int, const float4& x) {
      largest =
          max(max(max(KeyOf<SIGNED>(x.x), KeyOf<SIGNED>(x.y)), max(KeyOf<SIGNED>(x.z), KeyOf<SIGNED>(x.w))), largest);
    });
    const float rest = asked.by_mass ? 0.99f * (1.f - (asked.top_p > 0.f ? asked.top_p : 0.f)) / float(vocab) : 0.f;
    cutoff = Bits(rest);
    if (asked.by_count) {
      // `each` lanes of each warp have a column at or above the bound, which makes enough.
      const uint32_t each = (asked.count + WARPS - 1) / WARPS;
      uint32_t bound = 0, left = largest;
      if (each > 8) {
        if (each <= 32) bound = __reduce_min_sync(ALL, largest);
      } else {
        for (uint32_t i = 0; i < each; ++i) {
          bound = __reduce_max_sync(ALL, left);
          if (left == bound) left = 0;
        }
      }
      if (lane == 0) atomicMin(&shared.cutoff, bound);
    }
    largest = __reduce_max_sync(ALL, largest);
    if (lane == 0) atomicMax(&shared.largest, largest);
    if (asked.by_count) {
      __syncthreads();
      cutoff = max(cutoff, shared.cutoff);
    }
    float weight = 0.f;
    const uint32_t from = SIGNED ? cutoff : max(cutoff, 1u);
    if (asked.by_count || asked.by_mass) {
      slice.ForEach([&](int, const float4& x) {
        const float columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t key = KeyOf<SIGNED>(columns[e]);
          if (key < from) continue;
          const int bin = FirstBin<SIGNED>(key);
          if (asked.by_count) atomicAdd(shared.bins + bin, 1u);
          if (!SIGNED && asked.by_mass) {
            atomicAdd(shared.bins + FIRST_BINS + bin, __float2uint_rn(columns[e] * UNITS));
            weight += columns[e];
          }
        }
      });
    }
    if (!SIGNED && asked.by_mass) {
      weight = WarpSum(weight);
      if (lane == 0) atomicAdd(&shared.is_heavy, __float2uint_ru(fminf(weight, 4.f) * 1024.f));
    }
  }

  /// Publish the bins that the limits are reached in; every thread has one. `count` and `mass` are of the thread's bin.
  template <typename Reached>
  __device__ __forceinline__ void FindBins(uint64_t count, uint64_t mass, uint64_t higher_count, uint64_t higher_mass,
                                           const Reached& reached) {
    if (threadIdx.x == 0) shared.first_bin = shared.last_bin = -1;
    uint64_t columns = count, through = mass;
    BlockExclusive(columns, through, shared);
    columns += higher_count, through += higher_mass;
    const Reach most = reached(columns, through, columns + count, through + mass, true);
    const Reach least = reached(columns, through, columns + count, through + mass, false);
    if (most.through && !most.before) {
      shared.first_bin = threadIdx.x;
      shared.count_above = uint32_t(columns), shared.mass_above = through;
    }
    if (least.through && !least.before) {
      shared.last_bin = threadIdx.x;
      shared.count_through = uint32_t(columns + count), shared.mass_through = through + mass;
    } else if (threadIdx.x == THREADS - 1 && !least.through) {
      shared.count_through = uint32_t(columns + count), shared.mass_through = through + mass;
    }
    __syncthreads();
  }

  /// The rest of step 1. Returns whether the bracket can be listed; if not, [low, high] is to be searched.
  __device__ __forceinline__ bool First(Bracket& bracket, uint32_t& high) {
    const int lane = threadIdx.x % 32, blocks = ptx::ClusterSize();
    uint32_t largest = 0, heavy = 0;
    if (lane < blocks) {
      largest = *ptx::InBlock(&shared.largest, lane);
      if (asked.by_mass) heavy = *ptx::InBlock(&shared.is_heavy, lane);
    }
    if constexpr (!SIGNED) {
      emax = BiasedExponent(FromBits(__reduce_max_sync(ALL, largest)));
      scale = Scale(emax);
    }
    bracket = {SIGNED ? 0u : 1u, 0, 0};
    high = INFINITE_KEY;
    if (!asked.by_count && !asked.by_mass) return !asked.top_k_first;
    uint64_t count = 0, mass = 0;
#pragma unroll
    for (int block = 0; block < MAX_CLUSTER; ++block) {
      if (block >= blocks) continue;
      if (asked.by_count) count += ptx::InBlock(shared.bins, block)[threadIdx.x];
      if (!SIGNED && asked.by_mass) mass += ptx::InBlock(shared.bins, block)[FIRST_BINS + threadIdx.x];
    }
    const uint64_t limit = asked.top_p > 0.f ? uint64_t(asked.top_p * UNITS) : 0, error = uint64_t(vocab) + 2;
    FindBins(count, mass, 0, 0, [&](uint64_t c0, uint64_t m0, uint64_t c1, uint64_t m1, bool most) {
      Reach reach{asked.by_count && c0 >= asked.count, asked.by_count && c1 >= asked.count};
      if (!SIGNED && asked.by_mass) {
        const uint64_t more = most ? error : 0, less = most ? 0 : error;
        reach.before |= m0 != 0 && m0 + more >= limit + less;
        reach.through |= m1 != 0 && m1 + more >= limit + less;
      }
      return reach;
    });
    const int first = shared.first_bin, last = shared.last_bin;
    if (__reduce_max_sync(ALL, heavy) > HEAVY || first < 0 || last < 0) {
      cutoff = 0;
      return false;  // of the whole row
    }
    bracket.low = LowEdge<SIGNED>(last);
    high = first == 0 ? (SIGNED ? MOST : INFINITE_KEY) : LowEdge<SIGNED>(first - 1) - 1;
    if (asked.top_k_first && shared.count_through <= CANDIDATES) {
      bracket.width = INFINITE_KEY - bracket.low;
      return true;
    }
    uint64_t listed = shared.count_through - shared.count_above;
    if (!SIGNED && !asked.by_count) {
      // Each has the mass of the lower edge at least.
      const uint32_t least = __float2uint_rn(FromBits(bracket.low) * UNITS);
      listed = least == 0 ? MOST : (shared.mass_through - shared.mass_above) / least;
      if (last == FIRST_BINS - 1) listed = MOST;
    }
    bracket.width = high - bracket.low + 1;
    bracket.count_above = shared.count_above;
    if (listed <= CANDIDATES && !asked.top_k_first) return true;
    cutoff = 0;
    return false;
  }

  /// Step 2: the bin of [low, high] that the limits are reached in. True if the bracket can be listed.
  __device__ __forceinline__ bool Next(Bracket& bracket, uint32_t& high) {
    const int lane = threadIdx.x % 32, blocks = ptx::ClusterSize();
    const uint32_t low = bracket.low, range = high - low;
    const int shift = max(0, 24 - __clz(range));  // 8 bits
    ptx::ClusterSync();                           // all have read the last histogram
    for (int i = threadIdx.x; i < 2 * FIRST_BINS; i += THREADS) shared.bins[i] = 0;
    if (threadIdx.x == 0) shared.count_higher = 0, shared.quanta_higher = 0;
    __syncthreads();
    uint32_t* const halves = shared.bins + NEXT_BINS;
    uint32_t higher = 0;
    uint64_t quanta = 0;
    slice.ForEach([&](int, const float4& x) {
      const float columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t key = KeyOf<SIGNED>(columns[e]);
        if (key < low) continue;
        const uint32_t quantum = SIGNED ? 0 : QuantumOf(columns[e], scale);
        if (key > high) {
          ++higher, quanta += quantum;
        } else {
          const uint32_t bin = (high - key) >> shift;
          atomicAdd(shared.bins + bin, 1u);
          if constexpr (!SIGNED) {
            atomicAdd(halves + bin, quantum & 0xFFFFu);
            atomicAdd(halves + NEXT_BINS + bin, quantum >> 16);
          }
        }
      }
    });
    higher = WarpSum(higher), quanta = WarpSum(quanta);
    if (lane == 0) {
      atomicAdd(&shared.count_higher, higher);
      atomicAdd(&shared.quanta_higher, static_cast<unsigned long long>(quanta));
    }
    ptx::ClusterSync();
    uint64_t count = 0, mass = 0;
    if (threadIdx.x < NEXT_BINS) {
      for (int block = 0; block < blocks; ++block) {
        const uint32_t* const from = ptx::InBlock(shared.bins, block) + threadIdx.x;
        count += from[0];
        mass += from[NEXT_BINS] + (uint64_t(from[2 * NEXT_BINS]) << 16);
      }
    }
    higher = WarpSum(lane < blocks ? *ptx::InBlock(&shared.count_higher, lane) : 0u);
    quanta = WarpSum(lane < blocks ? uint64_t(*ptx::InBlock(&shared.quanta_higher, lane)) : uint64_t{0});
    FindBins(count, mass, higher, quanta, [&](uint64_t c0, uint64_t m0, uint64_t c1, uint64_t m1, bool) {
      return Reach{c0 >= count_limit || m0 >= quanta_limit, c1 >= count_limit || m1 >= quanta_limit};
    });
    const int bin = shared.first_bin;
    shared.kept_quanta = shared.mass_through;  // all write the same
    bracket.count_above = shared.count_above;
    bracket.width = 0;
    if (bin < 0) return true;  // all are wanted
    high -= uint32_t(bin) << shift;
    const uint32_t width = (1u << shift) - 1;
    if (high - low > width) bracket.low = high - width;
    if (shift == 0) return true;
    if (in_two_steps) {
      if (shared.count_through > CANDIDATES) return false;
      bracket.width = INFINITE_KEY - bracket.low;
      bracket.count_above = 0;
      return true;
    }
    bracket.width = high - bracket.low + 1;
    return shared.count_through - shared.count_above <= CANDIDATES;
  }

  /// Steps 1 and 2.
  __device__ __forceinline__ Bracket Find() {
    Bracket bracket;
    uint32_t high;
    bool is_found = First(bracket, high);
    if (asked.by_count) count_limit = asked.count;
    if (asked.by_mass) quanta_limit = QuantaLimit(asked.top_p, emax);
    in_two_steps = asked.top_k_first;
    for (int turn = 0; turn < 12 && !is_found; ++turn) {  // 4 and 4 at most
      is_found = Next(bracket, high);
      if (is_found && in_two_steps && bracket.width == 0) {  // what top-k keeps is known
        in_two_steps = is_found = false;
        count_limit = MOST;
        quanta_limit = QuantaLimitOf(asked.top_p, shared.kept_quanta);
        high = INFINITE_KEY;
      }
    }
    return bracket;
  }

  /// Step 3. Block 0 knows all after the next barrier of the cluster.
  template <bool MASSES>
  __device__ __forceinline__ void Report(const Bracket& bracket) {
    const int lane = threadIdx.x % 32, segment = slice.Segment();
    const bool needs_quanta = !SIGNED && (asked.by_mass || asked.top_k_first);
    const uint32_t from = max(bracket.low, cutoff);
    uint64_t mass = 0, quanta = 0;
    uint32_t within = 0, bit = 1;  // which of this lane's groups are to be listed
    slice.ForEach([&](int, const float4& x) {
      float columns[4] = {x.x, x.y, x.z, x.w};
      uint32_t key[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) key[e] = KeyOf<SIGNED>(columns[e]);
      if (max(max(key[0], key[1]), max(key[2], key[3])) >= from) {
        bool is_near = false;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (key[e] < from) {
            columns[e] = 0.f;
          } else if (key[e] - bracket.low < bracket.width) {
            is_near = true;
          } else if (needs_quanta) {
            quanta += QuantumOf(columns[e], scale);
          }
        }
        if (is_near) {
          within |= bit;
        } else if constexpr (MASSES) {
          mass += MassOf(Sum4(columns[0], columns[1], columns[2], columns[3]), emax);
        }
      }
      bit <<= 1;
    });
    const uint32_t mine = __popc(within), through = WarpInclusive(mine), all = __shfl_sync(ALL, through, 31);
    if (all != 0) {
      uint32_t at = 0;
      if (lane == 0) at = atomicAdd(ptx::InBlock(&shared.listed, 0), all);
      at = __shfl_sync(ALL, at, 0) + through - mine;
      float4* const group = ptx::InBlock(shared.group, 0);
      int32_t* const group_segment = ptx::InBlock(shared.group_segment, 0);
      for (; within != 0; within &= within - 1, ++at) {
        const int i = slice.First() + (__ffs(within) - 1) * WARP_COLUMNS;
        group[at] = *reinterpret_cast<const float4*>(slice.held + i);
        group_segment[at] = segment;
      }
    }
    if constexpr (MASSES) mass = WarpSum(mass);
    if (needs_quanta) quanta = WarpSum(quanta);
    if (lane == 0) {
      if constexpr (MASSES) ptx::InBlock(shared.segment_mass, 0)[segment] = mass;
      if (needs_quanta) ptx::InBlock(shared.segment_quanta, 0)[segment] = quanta;
    }
  }

  /// Step 4, by block 0: the threshold. The masses of segments are complete then, after a barrier of the block.
  template <bool MASSES>
  __device__ __forceinline__ uint32_t Decide(const Bracket& bracket) {
    uint32_t *const keys = shared.bins, *const sorted = keys + CANDIDATES + 32, *const equal = sorted + CANDIDATES;
    const int groups = shared.listed, thread = threadIdx.x;
    uint64_t quanta = 0;
    uint32_t threshold = bracket.low;
    if (groups != 0) {
      if (thread == 0) shared.keys = 0;
      if (thread < CANDIDATES) equal[thread] = 0;
      if (!SIGNED && (asked.by_mass || asked.top_k_first)) {
        for (int s = thread % 32; s < int(ptx::ClusterSize()) * WARPS; s += 32) quanta += shared.segment_quanta[s];
        quanta = WarpSum(quanta);
      }
      __syncthreads();
      if (thread < groups) {
        const float4 x = shared.group[thread];
        const float columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t key = KeyOf<SIGNED>(columns[e]);
          if (key >= max(bracket.low, cutoff) && key - bracket.low < bracket.width)
            keys[atomicAdd(&shared.keys, 1u)] = key;
        }
      }
      __syncthreads();
      const int count = shared.keys;
      if (thread < 4) keys[count + thread] = 0;  // above none
      __syncthreads();
      // Neighbouring lanes share a key, as many as there are threads for.
      int parts = 1;
      while (parts < 32 && count * parts * 2 <= THREADS) parts *= 2;
      const int mine = thread / parts;
      const uint32_t key = mine < count ? keys[mine] : MOST;
      uint32_t above = 0;
      for (int j = thread % parts * 4; j < count; j += parts * 4) {
        const uint4 other = *reinterpret_cast<const uint4*>(keys + j);
        above += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
      }
      for (int offset = 1; offset < parts; offset *= 2) above += __shfl_xor_sync(ALL, above, offset);
      if (mine < count && thread % parts == 0) sorted[above + atomicAdd(equal + above, 1u)] = key;
      __syncthreads();
      const uint32_t own = thread < count ? sorted[thread] : 0;
      uint64_t before = SIGNED ? 0 : QuantumOf(FromBits(own), scale), unused = 0;
      const uint64_t quantum = before;
      BlockExclusive(before, unused, shared);
      before += quanta;
      bool is_kept = thread < count && before < quanta_limit && bracket.count_above + thread < count_limit;
      threshold = sorted[max(__syncthreads_count(is_kept), 1) - 1];
      if (!SIGNED && in_two_steps) {
        if (own == threshold && (thread + 1 == count || sorted[thread + 1] != threshold)) {
          shared.kept_quanta = before + quantum;
        }
        __syncthreads();
        const uint64_t rest = QuantaLimitOf(asked.top_p, shared.kept_quanta);
        is_kept = thread < count && own >= threshold && before < rest;
        threshold = sorted[max(__syncthreads_count(is_kept), 1) - 1];
      }
      if (MASSES && thread < groups) {
        const float4 x = shared.group[thread];
        const float least = FromBits(threshold);
        const auto kept = [&](float w) { return w >= least ? w : 0.f; };
        const uint64_t mass = MassOf(Sum4(kept(x.x), kept(x.y), kept(x.z), kept(x.w)), emax);
        atomicAdd(reinterpret_cast<unsigned long long*>(shared.segment_mass + shared.group_segment[thread]),
                  static_cast<unsigned long long>(mass));
      }
    }
    return threshold;
  }
};

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
