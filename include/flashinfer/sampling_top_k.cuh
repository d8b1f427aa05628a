// SPDX-License-Identifier: Apache-2.0
// Draws from the top-k columns of rows of probabilities, k up to TOP_K (definitions and parameters: sampling.h). A
// cluster of blocks reads a row once and holds nothing of it: it sends the leading block the largest weight of each
// chunk of columns. The k-th largest of those is not above the k-th largest column, so that only chunks from there on,
// not many more than k, have columns that may be kept. The leader reads them again, and finishes.
#pragma once
#include "sampling_leader.cuh"

namespace flashinfer {
namespace sampling {

constexpr int TOP_CLUSTER = 8;
constexpr int TOP_BINS = 2 * RANK_THREADS;
constexpr int TOP_CHUNKS = 2048;  // of a row
constexpr int TOP_GROUPS = 1024;  // of four columns that the leader can list

struct TopShared {
  RankShared rank;
  union {
    struct {
      alignas(16) float4 group[TOP_GROUPS];
      int32_t group_place[TOP_GROUPS];
      uint64_t group_mass[TOP_GROUPS];
    };
    LeaderShared leader;
  };
  uint32_t chunk[TOP_CHUNKS];  // keys of the largest weights
  uint16_t taken[TOP_CHUNKS];
  uint32_t bins[TOP_BINS];
  uint32_t count_taken, count_groups, count_keys;
  uint32_t bound;
  uint64_t random;
};

/// 16 bins to an octave, downwards from the largest key.
__device__ __forceinline__ int BinOfKey(uint32_t key, uint32_t largest) {
  return min(int((largest - key) >> 19), TOP_BINS - 1);
}
__device__ __forceinline__ uint32_t LowestKey(int bin, uint32_t largest) {
  const int64_t key = int64_t{largest} + 1 - (int64_t{bin + 1} << 19);
  return bin == TOP_BINS - 1 || key < 1 ? 1 : uint32_t(key);
}

/// The largest key of each chunk, told to the leader. A chunk is one vector of all lanes, or 2 to 8 in large rows.
__device__ __forceinline__ void SendChunks(const float* row, int vocab, bool aligned, int log2_size,
                                           TopShared& shared) {
  const int lane = threadIdx.x % 32, warps = RANK_WARPS * ptx::ClusterSize();
  const int vectors = (vocab + WARP_COLUMNS - 1) / WARP_COLUMNS;
  uint32_t* const chunk = ptx::InBlock(shared.chunk, 0);
  bool is_running = false;
#pragma unroll 1
  for (int first = (ptx::ClusterRank() * RANK_WARPS + threadIdx.x / 32) * LEADER_VECTORS; first < vectors;
       first += warps * LEADER_VECTORS) {
    float x[LEADER_VECTORS][4];
#pragma unroll
    for (int j = 0; j < LEADER_VECTORS; ++j)
      LoadGroup(row, vocab, (first + j) * WARP_COLUMNS + lane * 4, aligned, x[j]);
    uint32_t key = 0;
#pragma unroll
    for (int j = 0; j < LEADER_VECTORS; ++j) {
      const float largest = fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3]));
      const uint32_t of_warp = WarpLargest(Bits(Positive(largest)));
      if (j >> log2_size == lane) key = max(key, of_warp);
    }
    if (!is_running) ptx::ClusterWait();  // for the leader to run
    is_running = true;
    const int mine = (first >> log2_size) + lane;
    if (lane < LEADER_VECTORS >> log2_size && mine << log2_size < vectors) chunk[mine] = key;
  }
  if (!is_running) ptx::ClusterWait();
}

/// The threshold and the draw, by the leader.
template <typename Found>
__device__ __forceinline__ void DrawTopK(const float* row, int vocab, bool aligned, int log2_size, const Asked& asked,
                                         TopShared& shared, const Found& found) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunks = ((vocab + WARP_COLUMNS - 1) / WARP_COLUMNS + (1 << log2_size) - 1) >> log2_size;
  for (int i = thread; i < TOP_BINS; i += RANK_THREADS) shared.bins[i] = 0;
  if (thread == 0) shared.count_taken = shared.count_groups = shared.count_keys = 0, shared.bound = 1;
  __syncthreads();
  uint32_t largest = 0;
  for (int c = thread; c < chunks; c += RANK_THREADS) {
    largest = max(largest, shared.chunk[c]);
  }
  largest = WarpLargest(largest);
  if (lane == 0) shared.rank.sorted[warp] = largest;
  __syncthreads();
  for (int w = 0; w < RANK_WARPS; ++w) largest = max(largest, shared.rank.sorted[w]);
  if (largest == 0) {
    if (thread == 0) found(-1);
    return;
  }
  for (int c = thread; c < chunks; c += RANK_THREADS) {
    if (shared.chunk[c] != 0) atomicAdd(shared.bins + BinOfKey(shared.chunk[c], largest), 1u);
  }
  __syncthreads();
  const uint32_t first = shared.bins[2 * thread], second = shared.bins[2 * thread + 1];
  uint64_t before = first + second, unused = 0;
  RankScan(before, unused, shared.rank);
  const int reached = before >= asked.count                    ? -1
                      : before + first >= asked.count          ? 0
                      : before + first + second >= asked.count ? 1
                                                               : -1;
  if (reached >= 0) shared.bound = LowestKey(2 * thread + reached, largest);
  __syncthreads();
  const uint32_t bound = shared.bound;
  for (int c = thread; c < chunks; c += RANK_THREADS) {
    if (shared.chunk[c] >= bound) shared.taken[atomicAdd(&shared.count_taken, 1u)] = uint16_t(c);
  }
  __syncthreads();
  const int vectors = int(shared.count_taken) << log2_size;
  constexpr int AT_ONCE = 4;
#pragma unroll 1
  for (int base = warp; base < vectors; base += RANK_WARPS * AT_ONCE) {
    float x[AT_ONCE][4];
    int start[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int i = base + j * RANK_WARPS;
      start[j] = vocab;
      if (i < vectors) {
        const int vector = (int(shared.taken[i >> log2_size]) << log2_size) + (i & ((1 << log2_size) - 1));
        start[j] = vector * WARP_COLUMNS + lane * 4;
      }
      LoadGroup(row, vocab, start[j], aligned, x[j]);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      uint32_t count = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[j][e] = Bits(Positive(x[j][e])) >= bound ? x[j][e] : 0.f;
        count += x[j][e] > 0.f;
      }
      if (count != 0) {
        const uint32_t at = atomicAdd(&shared.count_groups, 1u);
        atomicAdd(&shared.count_keys, count);
        if (at < TOP_GROUPS) {
          shared.group[at] = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
          shared.group_place[at] = start[j];
        }
      }
    }
  }
  __syncthreads();
  const int groups = shared.count_groups;
  const uint32_t keys = shared.count_keys;
  if (groups > TOP_GROUPS) {
    Leader(row, vocab, largest, shared.rank, shared.leader).SearchAndDraw(asked, largest, shared.random, found);
    return;
  }
  const int emax = BiasedExponent(FromBits(largest));
  const Scale scale(emax);
  const auto* const weights = reinterpret_cast<const uint32_t*>(shared.group);
  const auto key_at = [&](int i) { return weights[i]; };
  const auto quantum_of = [&](uint32_t key) { return uint64_t(QuantumOf(FromBits(key), scale)); };
  RankLimits limits{asked.count, asked.by_mass ? QuantaLimit(asked.top_p, emax) : UNLIMITED};
  Ranked result = FindRanked(4 * groups, keys, key_at, quantum_of, bound, largest, 0, 0, limits, shared.rank);
  if (asked.top_k_first) {
    limits = {UNLIMITED, QuantaLimitOf(asked.top_p, result.kept_quanta)};
    result = FindRanked(4 * groups, keys, key_at, quantum_of, result.key, largest, 0, 0, limits, shared.rank);
  }
  // Masses of groups, and what is before each of them.
  const float threshold = FromBits(result.key);
  const auto kept = [&](int g, float (&x)[4]) {
    const float4 v = shared.group[g];
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = x[e] >= threshold ? x[e] : 0.f;
  };
  if (thread == 0) shared.count_taken = 0;
  __syncthreads();
  uint64_t total = 0;
  for (int g = thread; g < groups; g += RANK_THREADS) {
    float x[4];
    kept(g, x);
    const float sum = Sum4(x[0], x[1], x[2], x[3]);
    if (sum > 0.f) {
      const uint64_t mass = MassOf(sum, emax);
      const uint32_t at = atomicAdd(&shared.count_taken, 1u);
      shared.taken[at] = uint16_t(g);
      shared.group_mass[g] = mass;
      total += mass;
    }
  }
  uint64_t none = 0, sum = total;
  RankScan(sum, none, shared.rank);
  if (thread == RANK_THREADS - 1) shared.rank.quanta_before = sum + total;
  __syncthreads();
  const uint64_t target = TargetOf(shared.random, shared.rank.quanta_before);
  const int count = shared.count_taken;
  for (int i = thread; i < count; i += RANK_THREADS) {
    const int g = shared.taken[i], start = shared.group_place[g];
    uint64_t earlier = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const int other = shared.taken[j];
      if (shared.group_place[other] < start) earlier += shared.group_mass[other];
    }
    if (target > earlier && target <= earlier + shared.group_mass[g]) {
      float x[4];
      kept(g, x);
      found(start + ColumnOf(x, target - earlier, emax));
    }
  }
}

/// A row of which top-k is asked, by a cluster whose threads have arrived at its barrier.
template <typename Found>
__device__ __forceinline__ void SampleTopK(const float* row, int vocab, const Asked& asked, uint64_t random,
                                           TopShared& shared, const Found& found) {
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  int log2_size = 0;
  while (vocab > TOP_CHUNKS * WARP_COLUMNS << log2_size) ++log2_size;
  SendChunks(row, vocab, aligned, log2_size, shared);
  ptx::ClusterArrive();
  if (ptx::ClusterRank() != 0) return;
  if (threadIdx.x == 0) shared.random = random;
  ptx::ClusterWait();
  __syncthreads();
  DrawTopK(row, vocab, aligned, log2_size, asked, shared, found);
}

}  // namespace sampling
}  // namespace flashinfer
