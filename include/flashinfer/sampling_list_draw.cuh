// SPDX-License-Identifier: Apache-2.0
// Draws from a row that one block reads and does not hold: of the survivors that a filter keeps (sampling_list.cuh) or,
// where these could not be listed, of the columns from a threshold on. Masses of segments, then a walk of one segment.
#pragma once
#include "sampling_list.cuh"

namespace flashinfer {
namespace sampling {

/// The last positive column that is at or above `threshold`; -1 if there is none. By one warp.
__device__ __forceinline__ int LastPositive(const Slice<false>& slice, float threshold) {
  int last = -1;
  for (int base = (slice.size - 1) / WARP_COLUMNS * WARP_COLUMNS; base >= 0 && last < 0; base -= WARP_COLUMNS) {
    const int i = base + threadIdx.x % 32 * 4;
    float x[4];
    slice.Read(i, x);
    if (KeptWeights(slice, threshold, x) > 0.f) last = i + (x[3] > 0.f ? 3 : x[2] > 0.f ? 2 : x[1] > 0.f ? 1 : 0);
    last = WarpMax(last);
  }
  return last;
}

/// Masses of segments of a row that is not held, and the draw.
struct Segments {
  static_assert(sizeof(Shared::histogram) == DRAW_SEGMENTS * sizeof(unsigned long long));
  static constexpr int COLUMNS = BATCH * WARP_COLUMNS;  // that a warp reads at a time
  Shared& shared;
  unsigned long long* masses;

  __device__ __forceinline__ explicit Segments(Shared& shared)
      : shared(shared), masses(reinterpret_cast<unsigned long long*>(shared.histogram)) {
    for (int i = threadIdx.x; i < DRAW_SEGMENTS; i += blockDim.x) masses[i] = 0;
    __syncthreads();
  }

  /// Columns of a segment; a row has up to DRAW_SEGMENTS.
  static __device__ __forceinline__ int Size(int vocab) {
    return (vocab + DRAW_SEGMENTS * COLUMNS - 1) / (DRAW_SEGMENTS * COLUMNS) * COLUMNS;
  }

  /// Call found(column), in one lane, of a draw by 64 random bits.
  template <typename F>
  __device__ __forceinline__ void Draw(const Slice<false>& slice, float threshold, int emax, uint64_t random,
                                       const F& found) {
    __syncthreads();
    const int each = DRAW_SEGMENTS / blockDim.x, lane = threadIdx.x % 32, size = Size(slice.size);
    uint64_t sum = 0;
    for (int i = 0; i < each; ++i) sum += masses[threadIdx.x * each + i];
    uint64_t before[1] = {sum};
    BlockExclusiveScan(before, shared.scratch);
    if (threadIdx.x == blockDim.x - 1) shared.scratch[1][0] = before[0] + sum;
    if (threadIdx.x == 0) shared.flag = -1;
    __syncthreads();
    const uint64_t target = TargetOf(random, shared.scratch[1][0]);
    if (target > before[0] && target <= before[0] + sum) {
      int segment = threadIdx.x * each;
      while (target > before[0] + masses[segment]) before[0] += masses[segment++];
      shared.flag = segment;
      shared.scratch[1][1] = before[0];
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    if (shared.flag < 0) {  // rounding
      const int last = LastPositive(slice, threshold);
      if (lane == 0) found(last);
      return;
    }
    uint64_t through = shared.scratch[1][1];
    for (int base = shared.flag * size; base < slice.size; base += COLUMNS) {
      float x[BATCH][4];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) slice.Read(base + j * WARP_COLUMNS + lane * 4, x[j]);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const uint64_t mass = MassOf(KeptWeights(slice, threshold, x[j]), emax);
        const uint64_t until = through + WarpInclusiveScan(mass);
        const uint32_t reached = __ballot_sync(0xffffffffu, until >= target);
        if (reached != 0) {
          const int i = base + j * WARP_COLUMNS + lane * 4;
          if (lane == __ffs(reached) - 1) found(i + ColumnOf(x[j], target - (until - mass), emax));
          return;
        }
        through = __shfl_sync(0xffffffffu, until, 31);
      }
    }
  }
};

/// Draw one of the columns that are kept.
template <typename F>
__device__ __forceinline__ void DrawSurvivor(const Slice<false>& slice, const Kept& kept, uint64_t random,
                                             const F& found, Shared& shared) {
  Segments segments(shared);
  const int size = Segments::Size(slice.size);
  ForEachMass(kept, [&](int column, uint64_t mass) {
    atomicAdd(segments.masses + column / size, static_cast<unsigned long long>(mass));
  });
  segments.Draw(slice, FromBits(kept.threshold), kept.emax, random, found);
}

/// Draw a column of the row that is at or above `threshold`.
template <typename F>
__device__ __forceinline__ void DrawColumn(const Slice<false>& slice, float threshold, int emax, uint64_t random,
                                           const F& found, Shared& shared) {
  Segments segments(shared);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, size = Segments::Size(slice.size);
  for (int base = threadIdx.x / 32 * Segments::COLUMNS; base < slice.size; base += warps * Segments::COLUMNS) {
    float x[BATCH][4];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) slice.Read(base + j * WARP_COLUMNS + lane * 4, x[j]);
    uint64_t mass = 0;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) mass += MassOf(KeptWeights(slice, threshold, x[j]), emax);
    mass = WarpSum(mass);
    if (lane == 0) atomicAdd(segments.masses + base / size, static_cast<unsigned long long>(mass));
  }
  segments.Draw(slice, threshold, emax, random, found);
}

}  // namespace sampling
}  // namespace flashinfer
