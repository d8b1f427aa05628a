// SPDX-License-Identifier: Apache-2.0
// The threshold of a filter in one read of the row, by one block and without holding the row:
//   1. 2048 columns are sampled for a bound, which the threshold is most likely not below;
//   2. the row is read, and its columns from the bound on, the survivors, are listed in shared memory;
//   3. the threshold is found among the survivors. It is exact if the filter's limit is reached there. If not, or if
//      there are too many survivors, the caller searches the row (sampling_select.cuh).
#pragma once
#include "sampling.cuh"

namespace flashinfer {
namespace sampling {

constexpr int BATCH = 6;              // vectors that a thread loads before it uses one; 8 spill four times as much
constexpr float DEVIATIONS = 4.f;     // standard deviations of what a sample says that a bound stays away
constexpr float LEAST_SAMPLES = 4.f;  // samples above a bound by mass

/// The column or weight that a key belongs to.
template <bool SIGNED>
__device__ __forceinline__ float KeyValue(uint32_t key) {
  return FromBits(!SIGNED ? key : key >> 31 ? key ^ 0x80000000u : ~key);
}

struct Survivors {
  const Survivor* list;
  int count;
  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t low, uint32_t high, const F& f) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t key = list[i].key;
      if (key >= low && key <= high) f(key);
    }
  }
};

/// What a filter keeps of a row.
struct Kept {
  Survivors survivors;  // among them all that is kept
  uint32_t threshold;   // key
  int emax;
};

/// The sums over the block of three numbers, to every thread. Calls that follow each other take another `turn`.
__device__ __forceinline__ void BlockSums(float (&x)[3], int turn, Shared& shared) {
  float* const by_warp = reinterpret_cast<float*>(shared.scratch) + turn % 2 * 3 * MAX_WARPS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    x[n] = GroupSum(x[n], 32);
    if (lane == 0) by_warp[n * MAX_WARPS + warp] = x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 3; ++n) x[n] = GroupSum(lane < warps ? by_warp[n * MAX_WARPS + lane] : 0.f, 32);
}

/// A key that the row probably has `count` columns at or above, or less than `rest` below; 1 where the sample has no
/// such key. 0 where there would be too many survivors.
template <bool SIGNED, typename T>
__device__ __forceinline__ uint32_t SampledBound(const Slice<false, T>& slice, uint32_t count, float rest,
                                                 Shared& shared) {
  float x[4], sums[3] = {};
  slice.Read(int(uint64_t(threadIdx.x) * (slice.size / 4) / blockDim.x) * 4, x);
  const float columns_each = float(slice.size) / float(4 * blockDim.x), mean = float(count) / columns_each;
  const float wanted = mean + DEVIATIONS * sqrtf(mean) + 3.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) sums[0] += KeyOf<SIGNED>(slice, x[e]) > 0 ? 1.f : 0.f;
  BlockSums(sums, 0, shared);
  float samples = sums[0];
  uint32_t low = 0, high = 1 << 16;  // the upper half of keys: low is low enough, high is not
  for (int turn = 1; turn <= 16; ++turn) {
    const uint32_t middle = (low + high) / 2;
    sums[0] = sums[1] = sums[2] = 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (KeyOf<SIGNED>(slice, x[e]) >> 16 >= middle) {
        sums[0] += 1.f;
      } else if (!SIGNED) {
        const float weight = Positive(x[e]);
        sums[1] += weight;
        sums[2] = fmaf(weight, weight, sums[2]);
      }
    }
    BlockSums(sums, turn, shared);
    const bool has_mass = sums[0] >= LEAST_SAMPLES && columns_each * (sums[1] + DEVIATIONS * sqrtf(sums[2])) <= rest;
    if (sums[0] >= wanted || has_mass) {
      low = middle;
      samples = sums[0];
    } else {
      high = middle;
    }
  }
  if (samples * columns_each > float(SURVIVORS)) return 0;
  if (SIGNED && (low < 0x0080u || low > 0xFF80u)) return 0;  // as low as -inf, or NaN
  return max(low << 16, 1u);
}

/// Step 2. `visit(i)` is called for each group of four columns. Returns how many there are, listed if they fit.
template <bool SIGNED, typename T, typename Visit>
__device__ __forceinline__ int ListSurvivors(const Slice<false, T>& slice, uint32_t bound, Survivor* list,
                                             const Visit& visit, Shared& shared) {
  const int step = blockDim.x * 4, lane = threadIdx.x % 32;
  const float least = KeyValue<SIGNED>(bound);
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  for (int base = 0; base < slice.size; base += step * BATCH) {  // in whole warps
    const int first = base + threadIdx.x * 4;
    float x[BATCH][4];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) slice.Read(first + j * step, x[j]);
    uint32_t taken = 0;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      visit(first + j * step);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // NaN is the largest of SIGNED columns, and no weight. Past the end there is -inf.
        if (SIGNED ? !(x[j][e] < least) : x[j][e] >= least) taken |= 1u << (j * 4 + e);
      }
    }
    if (__ballot_sync(0xffffffffu, taken != 0) == 0) continue;
    const uint32_t mine = __popc(taken);
    uint32_t at = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t below = __shfl_up_sync(0xffffffffu, at, offset);
      if (lane >= offset) at += below;
    }
    uint32_t end = 0;
    if (lane == 31) end = atomicAdd(&shared.listed, at) + at;
    const uint32_t all = __shfl_sync(0xffffffffu, at, 31);
    end = __shfl_sync(0xffffffffu, end, 31);
    if (end > SURVIVORS) continue;
    at += end - all - mine;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (taken >> (j * 4 + e) & 1) {
          list[at++] = {SIGNED ? OrderedKey(x[j][e]) : Bits(x[j][e]), first + j * step + e};
        }
      }
    }
  }
  __syncthreads();
  return int(shared.listed);
}

/// All steps; false where the row has to be searched. `limits_of(emax)` is what the filter wants.
template <bool SIGNED, typename T, typename LimitsOf, typename Visit>
__device__ __forceinline__ bool FindAmongSurvivors(const Slice<false, T>& slice, const LimitsOf& limits_of,
                                                   Survivor* list, const Visit& visit, Shared& shared, Kept& kept) {
  Limits limits = limits_of(ONE);
  const float rest = limits.wanted.quanta == UNLIMITED ? -1.f : 1.f - limits.top_p;
  const uint32_t bound = SampledBound<SIGNED>(slice, limits.wanted.count, rest, shared);
  if (bound == 0) return false;
  const int count = ListSurvivors<SIGNED>(slice, bound, list, visit, shared);
  if (count == 0 || count > SURVIVORS) return false;
  kept.survivors = {list, count};

  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  uint32_t largest = 0;
  kept.survivors.ForEach(bound, ~uint32_t{0}, [&](uint32_t key) { largest = max(largest, key); });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if (lane == 0) shared.scratch[0][threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < warps; ++w) largest = max(largest, uint32_t(shared.scratch[0][w]));
  kept.emax = SIGNED ? ONE : BiasedExponent(FromBits(largest));
  const Scale scale(kept.emax);
  limits = limits_of(kept.emax);
  uint64_t columns = 0, quanta = 0;
  kept.survivors.ForEach(bound, ~uint32_t{0}, [&](uint32_t key) {
    ++columns;
    if constexpr (!SIGNED) quanta += QuantumOf(FromBits(key), scale);
  });
  columns = WarpSum(columns), quanta = WarpSum(quanta);
  if (lane == 0) shared.scratch[1][threadIdx.x / 32] = columns, shared.scratch[2][threadIdx.x / 32] = quanta;
  __syncthreads();
  columns = quanta = 0;
  for (int w = 0; w < warps; ++w) columns += shared.scratch[1][w], quanta += shared.scratch[2][w];
  __syncthreads();
  // From 1 on, all weights are among the survivors.
  if (bound > 1 && columns < limits.wanted.count && quanta < limits.wanted.quanta) return false;
  Found result{bound, 0};
  const int searches = !SIGNED && limits.top_k_first ? 2 : 1;
#pragma unroll 1
  for (int search = 0; search < searches; ++search) {
    if (search == 1) {
      limits.wanted = {~uint32_t{0}, QuantaLimitOf(limits.top_p, result.kept_quanta)};
      __syncthreads();
    }
    result = FindKey<SIGNED, true>(kept.survivors, result.key, largest, 0, 0, limits.wanted, scale, shared);
  }
  kept.threshold = result.key;
  __syncthreads();
  return true;
}

/// f(first column of the group, mass) of each group of four columns with some that are kept. Survivors of a group
/// follow each other in the list.
template <typename F>
__device__ __forceinline__ void ForEachMass(const Kept& kept, const F& f) {
  const Survivor* const list = kept.survivors.list;
  const int count = kept.survivors.count;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int column = list[i].column & ~3;
    if (i > 0 && (list[i - 1].column & ~3) == column) continue;
    float x[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= count || (list[i + j].column & ~3) != column) break;
      const float weight = list[i + j].key >= kept.threshold ? FromBits(list[i + j].key) : 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = list[i + j].column % 4 == e ? weight : x[e];
    }
    const float sum = Sum4(x[0], x[1], x[2], x[3]);
    if (sum > 0.f) f(column, MassOf(sum, kept.emax));
  }
}

}  // namespace sampling
}  // namespace flashinfer
