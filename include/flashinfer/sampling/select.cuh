// SPDX-License-Identifier: Apache-2.0
// The threshold of top-k and top-p over a row of a cluster (row.cuh), exact and in a bounded number of steps:
//   1. each block counts its columns in bins of keys, 64 to an octave, downwards from the largest;
//   2. block 0 adds up the counts and brackets the threshold. By count that is one bin. By mass it may be a few: a
//      column weighs something between the edges of its bin, which are 1.6 % apart;
//   3. each block sets aside its columns within the bracket and sums up the quanta of those above;
//   4. block 0 finds the threshold among what was set aside (key.cuh).
// Steps 1 and 3 walk the whole slice, 4 some hundred columns. Where a block has more of them in the bracket (ties, say),
// all blocks take part in step 4 and walk their slices.
#pragma once
#include "key.cuh"

namespace flashinfer {
namespace sampling {

constexpr int BIN_SHIFT = 17;
constexpr uint32_t OPEN_COUNT = 1024;  // so few columns down to the bracket's end are all set aside

/// Step 2, by block 0: `shared.bracket` of every block.
__device__ __forceinline__ void FindBracket(uint32_t top, const Wanted& wanted, const Scale& scale, Shared& shared) {
  constexpr int MOST = BINS / 256;  // bins of a thread, if there are no more than 256 threads
  const int mine = BINS / blockDim.x, first = threadIdx.x * mine, blocks = ptx::ClusterSize();
  uint32_t count[MOST] = {};
#pragma unroll 4
  for (int block = 0; block < blocks; ++block) {  // four at a time: each load takes some 250 cycles
    const auto* from = reinterpret_cast<const uint4*>(ptx::InBlock(shared.histogram, block) + first);
#pragma unroll
    for (int i = 0; i < MOST; i += 4) {
      if (i < mine) {
        const uint4 four = from[i / 4];
        count[i] += four.x, count[i + 1] += four.y, count[i + 2] += four.z, count[i + 3] += four.w;
      }
    }
  }
  // Columns, and the least and the most quanta that they can have.
  const auto edge = [&](int bin) { return (int64_t(top) - (int64_t(bin) << BIN_SHIFT)); };
  const auto quantum = [&](int64_t key) { return key > 0 ? uint64_t(QuantumOf(FromBits(uint32_t(key)), scale)) : 0; };
  const auto least = [&](int bin) { return bin == BINS - 1 ? 0 : quantum(edge(bin + 1) + 1); };
  const auto most = [&](int bin) { return quantum(edge(bin)); };
  uint64_t sum[3] = {};
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i < mine && count[i] != 0) {
      sum[0] += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
    }
  }
  if (threadIdx.x == 0) shared.first_bin = shared.last_bin = BINS - 1;
  BlockExclusiveScan(sum, shared.scratch);
  uint64_t columns = sum[0];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i < mine && count[i] != 0) {
      columns += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
      if (columns >= wanted.count || sum[2] >= wanted.quanta) atomicMin(&shared.first_bin, uint32_t(first + i));
      if (columns >= wanted.count || sum[1] >= wanted.quanta) atomicMin(&shared.last_bin, uint32_t(first + i));
    }
  }
  __syncthreads();
  // The thread that owns the bracket's first bin knows what is above it; the one that owns the last, what is within.
  const int from = shared.first_bin, to = shared.last_bin;
  uint32_t* const above = &shared.bracket.count_above;
  columns = sum[0];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i < mine) {
      if (first + i == from) *above = uint32_t(columns);
      columns += count[i];
      if (first + i == to) shared.bracket.is_open = columns <= OPEN_COUNT;
    }
  }
  __syncthreads();
  if (threadIdx.x < blocks) {
    Bracket bracket;
    bracket.is_open = shared.bracket.is_open;
    bracket.count_above = bracket.is_open ? 0 : *above;
    bracket.high = from == 0 || bracket.is_open ? ~uint32_t{0} : uint32_t(edge(from));
    if (bracket.high == ~uint32_t{0}) bracket.is_open = 1, bracket.count_above = 0;
    const int64_t low = to == BINS - 1 ? 0 : edge(to + 1) + 1;
    bracket.low = low < 1 ? 1 : uint32_t(low);
    __syncwarp(blocks == 1 ? 1u : (1u << blocks) - 1);  // all have read this block's bracket before it is replaced
    *ptx::InBlock(&shared.bracket, threadIdx.x) = bracket;
  }
}

/// Step 3. Returns whether some block of the cluster has more columns within the bracket than it can set aside.
template <bool RESIDENT, typename T>
__device__ __forceinline__ bool SetAside(const Slice<RESIDENT, T>& slice, const Bracket& bracket, const Scale& scale,
                                         Shared& shared) {
  const int blocks = ptx::ClusterSize();
  const volatile uint32_t& listed = shared.listed;
  uint64_t quanta = 0;
  slice.ForEachGroup([&](int, float (&x)[4]) {
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
    if (within != 0 && listed <= LIST) {  // more are of no use
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
  if (threadIdx.x < blocks) ptx::InBlock(shared.overflow, threadIdx.x)[ptx::ClusterRank()] = listed > LIST;
  if (threadIdx.x == 0) {
    for (int w = 1; w < int(blockDim.x) / 32; ++w) quanta += shared.scratch[0][w];
    shared.quanta_above = quanta;
  }
  ptx::ClusterSync();
  bool is_much = false;
  for (int i = 0; i < blocks; ++i) is_much |= shared.overflow[i] != 0;
  return is_much;
}

/// The quanta of all columns above the bracket.
__device__ __forceinline__ uint64_t QuantaAbove(Shared& shared) {
  const int lane = threadIdx.x % 32;
  return WarpSum(lane < int(ptx::ClusterSize()) ? *ptx::InBlock(&shared.quanta_above, lane) : 0);
}

/// What the blocks have set aside, for the threads of block 0. Each warp takes the list of one block (or a part of
/// it) into registers; where that is too much, every walk reads the lists.
struct Listed {
  static constexpr int PER_LANE = 8;
  Shared& shared;
  uint32_t keys[PER_LANE];
  int count;  // of `keys`; -1: too many

  __device__ __forceinline__ explicit Listed(Shared& shared) : shared(shared) {
    const int blocks = ptx::ClusterSize(), parts = blockDim.x / 32 / blocks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % blocks, part = warp / blocks;
    const int listed = lane < blocks ? int(*ptx::InBlock(&shared.listed, lane)) : 0;
    count = -1;
    if (WarpMax(listed) > PER_LANE * 32 * parts) return;
    const int mine = __shfl_sync(0xffffffffu, listed, block);
    const uint32_t* list = ptx::InBlock(shared.list, block);
    const int step = 32 * parts, from = part * 32 + lane;
    count = mine > from ? (mine - from + step - 1) / step : 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) keys[i] = i < count ? list[from + i * step] : 0;
  }

  /// f(key) of each within [low, high].
  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t low, uint32_t high, const F& f) const {
    if (count >= 0) {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (i < count && keys[i] >= low && keys[i] <= high) f(keys[i]);
      }
      return;
    }
    for (int block = 0; block < int(ptx::ClusterSize()); ++block) {
      const int listed = *ptx::InBlock(&shared.listed, block);
      for (int i = threadIdx.x; i < listed; i += blockDim.x) {
        const uint32_t key = ptx::InBlock(shared.list, block)[i];
        if (key >= low && key <= high) f(key);
      }
    }
  }
};

/// All keys of a block.
template <bool RESIDENT, typename T>
struct SliceKeys {
  const Slice<RESIDENT, T>& slice;

  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t low, uint32_t high, const F& f) const {
    slice.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (key >= low && key <= high) f(key);
      }
    });
  }
};

/// Step 4 by all blocks, and all that there is to do after it. Not inlined: it is rare.
template <bool RESIDENT, typename T>
__device__ __noinline__ uint32_t FindInSlices(const Slice<RESIDENT, T> slice, const Bracket bracket, uint32_t top,
                                              Wanted wanted, bool top_k_first, float top_p, const Scale scale,
                                              Shared& shared) {
  const SliceKeys<RESIDENT, T> keys{slice};
  const uint64_t above = QuantaAbove(shared);
  Found found = FindKey<true>(keys, bracket.low, bracket.is_open ? top : bracket.high, bracket.count_above, above,
                              wanted, scale, shared);
  if (top_k_first) {
    ptx::ClusterSync();
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
    found = FindKey<true>(keys, found.key, top, 0, 0, wanted, scale, shared);
  }
  ptx::ClusterSync();
  return found.key;
}

/// The key of the smallest column to keep; `top` is that of the largest. With `top_k_first`, top_p is of the columns
/// that top-k keeps, not of the row.
template <bool RESIDENT, typename T>
__device__ __forceinline__ uint32_t FindThreshold(const Slice<RESIDENT, T>& slice, uint32_t top, int emax,
                                                  Wanted wanted, bool top_k_first, float top_p, Shared& shared) {
  const Scale scale(emax);
  const bool is_leader = ptx::ClusterRank() == 0;
  uint32_t threshold = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) shared.histogram[i] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    slice.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (key != 0) atomicAdd(shared.histogram + min((top - key) >> BIN_SHIFT, uint32_t(BINS - 1)), 1u);
      }
    });
    ptx::ClusterSync();
    if (is_leader) FindBracket(top, wanted, scale, shared);
    ptx::ClusterSync();

    const Bracket bracket = shared.bracket;
    if (SetAside(slice, bracket, scale, shared)) {
      const bool is_first = top_k_first && pass == 0;
      return max(threshold, FindInSlices(slice, bracket, top, wanted, is_first, top_p, scale, shared));
    }
    const bool is_open = bracket.is_open;
    if (is_leader) {
      const Listed listed(shared);
      const uint64_t above = QuantaAbove(shared);
      const uint32_t high = is_open ? max(top, bracket.low) : bracket.high;
      Found found{bracket.low, 0};
      const int searches = top_k_first && is_open && pass == 0 ? 2 : 1;
#pragma unroll 1
      for (int search = 0; search < searches; ++search) {
        if (search == 1) {  // all that top-k keeps has been set aside
          wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
          __syncthreads();
        }
        found = FindKey<false>(listed, found.key, high, bracket.count_above, above, wanted, scale, shared);
      }
      if (threadIdx.x < ptx::ClusterSize()) {
        *ptx::InBlock(&shared.threshold, threadIdx.x) = found.key;
        *ptx::InBlock(&shared.kept_quanta, threadIdx.x) = found.kept_quanta;
      }
    }
    ptx::ClusterSync();
    threshold = max(threshold, shared.threshold);
    if (!top_k_first || is_open || pass == 1) break;
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, shared.kept_quanta)};
    __syncthreads();  // all have read the bracket and the result
  }
  return threshold;
}

}  // namespace sampling
}  // namespace flashinfer
