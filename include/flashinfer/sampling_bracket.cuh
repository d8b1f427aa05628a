// SPDX-License-Identifier: Apache-2.0
// Steps 1 and 2 of the search over a held row (sampling_search.cuh): histograms bracket the threshold until block 0
// can list the columns within.
#pragma once
#include "ptx/reduce.cuh"
#include "sampling_search.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

constexpr int BIN_SHIFT = 19;
constexpr uint32_t TOP = 0x3fffffffu;    // the first bin begins below 2, the last ends at 2^-31
constexpr uint32_t SMALL = 0x3b800000u;  // SIGNED: 2^-8, below which there is one bin for each sign
constexpr float UNITS = 2147483648.f;    // of mass in the first histogram, in 1
constexpr uint32_t HEAVY = 1900;         // 1024ths of weight, in a block: below 2, at which masses overflow

/// The bin of a key in the first histogram; the largest keys come first.
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
__device__ __forceinline__ void Search<SIGNED>::Fill() {
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
      if (each <= 32) bound = ptx::ReduceMin(largest);
    } else {
      for (uint32_t i = 0; i < each; ++i) {
        bound = ptx::ReduceMax(left);
        if (left == bound) left = 0;
      }
    }
    if (lane == 0) atomicMin(&shared.cutoff, bound);
  }
  largest = ptx::ReduceMax(largest);
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

template <bool SIGNED>
template <typename Reached>
__device__ __forceinline__ void Search<SIGNED>::FindBins(uint64_t count, uint64_t mass, uint64_t higher_count,
                                                         uint64_t higher_mass, const Reached& reached) {
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

template <bool SIGNED>
__device__ __forceinline__ bool Search<SIGNED>::First(Bracket& bracket, uint32_t& high) {
  const int lane = threadIdx.x % 32, blocks = ptx::ClusterSize();
  uint32_t largest = 0, heavy = 0;
  if (lane < blocks) {
    largest = *ptx::InBlock(&shared.largest, lane);
    if (asked.by_mass) heavy = *ptx::InBlock(&shared.is_heavy, lane);
  }
  if constexpr (!SIGNED) {
    emax = BiasedExponent(FromBits(ptx::ReduceMax(largest)));
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
  if (ptx::ReduceMax(heavy) > HEAVY || first < 0 || last < 0) {
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

template <bool SIGNED>
__device__ __forceinline__ bool Search<SIGNED>::Next(Bracket& bracket, uint32_t& high) {
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

template <bool SIGNED>
__device__ __forceinline__ Bracket Search<SIGNED>::Find() {
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

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
