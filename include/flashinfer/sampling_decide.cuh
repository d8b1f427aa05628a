// SPDX-License-Identifier: Apache-2.0
// Steps 3 and 4 of the search over a held row (sampling_search.cuh): block 0 gets a list of the columns near the
// threshold, and what the columns above weigh; it sorts the list, and finds the threshold.
#pragma once
#include "sampling_search.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

template <bool SIGNED>
template <bool MASSES>
__device__ __forceinline__ void Search<SIGNED>::Report(const Bracket& bracket) {
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

template <bool SIGNED>
template <bool MASSES>
__device__ __forceinline__ uint32_t Search<SIGNED>::Decide(const Bracket& bracket) {
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

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
