// SPDX-License-Identifier: Apache-2.0
// A row of weights held by a cluster of blocks: loading, iteration, sums and sampling. Also block-wide scans that other
// files use.
//
// Each block owns a slice of the row, in shared memory (RESIDENT: the row is read from DRAM once) or, where no
// cluster can hold the row, in global memory. Within the slice each warp owns a contiguous segment. Every block
// receives the masses of all segments, whose prefix sums select the segment of a sample.
#pragma once
#include "../ptx/cluster.cuh"
#include "../sampling.h"
#include "fixed_point.h"
#include "../utils.cuh"
#include "../vec_dtypes.cuh"
#include "../warp.cuh"

namespace flashinfer {
namespace sampling {

constexpr int MAX_WARPS = 16;
constexpr int SEGMENTS = 64;  // upper bound of blocks times warps
constexpr int IN_FLIGHT = 8;  // vectors that a thread loads before it uses the first one
/// Threads of a block, and the blocks that should fit an SM; their shared memory allows it up to a vocabulary of 128K.
constexpr int Threads(bool is_resident) { return is_resident ? 256 : 512; }
constexpr int Blocks(bool is_resident) { return is_resident ? 3 : 2; }
constexpr int WARP_COLUMNS = 128;  // columns that a warp loads at once, four per lane

/// Shared memory of a block, in front of its slice.
struct alignas(16) RowShared {
  uint64_t segment_mass[SEGMENTS];
  int32_t segment_last[SEGMENTS];  // start of the last group of four with a positive weight, or -1
  float largest[MAX_CLUSTER];
  float by_warp[MAX_WARPS];
  int32_t flag;
};

/// Exclusive prefix sums of N numbers over the block.
template <int N>
__device__ __forceinline__ void BlockExclusiveScan(uint64_t (&x)[N], uint64_t (&scratch)[3][MAX_WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t through[N];
  __syncthreads();  // scratch may still be read
#pragma unroll
  for (int n = 0; n < N; ++n) {
    through[n] = WarpInclusiveScan(x[n]);
    if (lane == 31) scratch[n][warp] = through[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    uint64_t before = through[n] - x[n];
    for (int w = 0; w < warp; ++w) before += scratch[n][w];
    x[n] = before;
  }
}

/// The slice of a row that this block owns.
template <bool RESIDENT, typename T = float>
struct Slice {
  float* held;      // RESIDENT: the columns, padded to a multiple of four with weightless values
  const T* global;  // not RESIDENT: first column of the slice
  const T* minus;   // null, or values to subtract from the columns; `vectorised` is false then
  int begin, size;  // columns [begin, begin + size) of the row; begin is a multiple of four
  bool vectorised;  // `global` may be read four columns at a time

  /// Read four columns from `i` on; columns past the end weigh nothing.
  __device__ __forceinline__ void Read(int i, float (&x)[4]) const {
    if constexpr (RESIDENT) {
      const float4 v = *reinterpret_cast<const float4*>(held + i);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if (vectorised && i + 4 <= size) {
      const auto v = Vec<T, 4>::Load(global + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = ToFloat(v[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = i + j < size ? ToFloat(global[i + j]) : -INFINITY;
        if (minus != nullptr && i + j < size) x[j] -= ToFloat(minus[i + j]);
      }
    }
  }

  /// Call f(i, x) for each group of four columns of this warp's segment; i counts from the start of the slice.
  template <typename F>
  __device__ __forceinline__ void ForEachGroup(const F& f) const {
    const int segment = SegmentSize(), end = min(size, (int(threadIdx.x / 32) + 1) * segment);
#pragma unroll 4
    for (int i = threadIdx.x / 32 * segment + threadIdx.x % 32 * 4; i < end; i += WARP_COLUMNS) {
      float x[4];
      Read(i, x);
      f(i, x);
    }
  }
  __device__ __forceinline__ int SegmentSize() const {
    const int warps = blockDim.x / 32;
    return (size + warps * WARP_COLUMNS - 1) / (warps * WARP_COLUMNS) * WARP_COLUMNS;
  }
};

/// Return the columns per block of the cluster; the last blocks may get fewer, or none.
__device__ __forceinline__ int SliceSize(int vocab, int blocks) { return ((vocab + blocks - 1) / blocks + 3) & ~3; }

/// Return this block's slice of the row that starts at `row`, not loaded yet.
template <bool RESIDENT, typename T>
__device__ __forceinline__ Slice<RESIDENT, T> SliceOf(const T* row, int vocab, float* held, bool vectorised) {
  const int stride = SliceSize(vocab, ptx::ClusterSize());
  Slice<RESIDENT, T> slice;
  slice.begin = min(int(ptx::ClusterRank()) * stride, vocab);
  slice.size = min(stride, vocab - slice.begin);
  slice.held = held;
  slice.global = row + slice.begin;
  slice.minus = nullptr;
  slice.vectorised = vectorised;
  return slice;
}

/// Iterate over this block's slice of a row, and store it where it is RESIDENT. `value(i)` is column i of the row,
/// `values4(i, x)` loads four columns where `vectorised`. Returns the largest `measure(x)` of the slice.
template <bool RESIDENT, typename T, typename Value, typename Values4, typename Measure>
__device__ __forceinline__ float LoadSlice(const Slice<RESIDENT, T>& slice, float pad, const Value& value,
                                           const Values4& values4, const Measure& measure) {
  float largest = -INFINITY;
  const int step = blockDim.x * 4;
  for (int base = threadIdx.x * 4; base < slice.size; base += step * IN_FLIGHT) {
    float x[IN_FLIGHT][4];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      const int i = base + j * step;
      if (slice.vectorised && i + 4 <= slice.size) {
        values4(slice.begin + i, x[j]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[j][e] = i + e < slice.size ? value(slice.begin + i + e) : pad;
      }
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      const int i = base + j * step;
      if (i < slice.size) {
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = fmaxf(largest, measure(x[j][e]));
        if constexpr (RESIDENT)
          *reinterpret_cast<float4*>(slice.held + i) = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
      }
    }
  }
  return largest;
}

/// Return the maximum over the cluster, after a barrier at which all slices have been loaded.
__device__ __forceinline__ float ClusterMax(float x, RowShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = ptx::ClusterSize();
  x = WarpMax(x);
  if (lane == 0) shared.by_warp[warp] = x;
  ptx::ClusterWait();  // pairs with the arrival at the start: every block runs
  __syncthreads();
  if (warp == 0) {
    x = WarpMax(lane < int(blockDim.x) / 32 ? shared.by_warp[lane] : -INFINITY);
    if (lane < blocks) ptx::InBlock(shared.largest, lane)[ptx::ClusterRank()] = x;
  }
  ptx::ClusterSync();
  x = shared.largest[0];
  for (int i = 1; i < blocks; ++i) x = fmaxf(x, shared.largest[i]);
  return x;
}

/// Zero the weights of a group below `threshold`; return the sum of the others.
__device__ __forceinline__ float KeptWeights(float threshold, float (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float weight = Positive(x[j]);
    x[j] = weight >= threshold ? weight : 0.f;
  }
  return Sum4(x[0], x[1], x[2], x[3]);
}

/// Send every block of the cluster the mass of this warp's segment and the start of its last positive group.
__device__ __forceinline__ void ShareSegment(uint64_t mass, int last, RowShared& shared) {
  mass = WarpSum(mass);
  last = WarpMax(last);
  const int lane = threadIdx.x % 32, segment = ptx::ClusterRank() * (blockDim.x / 32) + threadIdx.x / 32;
  if (lane < int(ptx::ClusterSize())) {
    ptx::InBlock(shared.segment_mass, lane)[segment] = mass;
    ptx::InBlock(shared.segment_last, lane)[segment] = last;
  }
  ptx::ClusterSync();
}

/// Sum the masses of the kept columns by segment and send the sums to every block of the cluster.
template <bool RESIDENT, typename T>
__device__ __forceinline__ void ShareMasses(const Slice<RESIDENT, T>& slice, float threshold, int emax,
                                            RowShared& shared) {
  uint64_t mass = 0;
  int last = -1;
  slice.ForEachGroup([&](int i, float (&x)[4]) {
    const float sum = KeptWeights(threshold, x);
    mass += MassOf(sum, emax);
    if (sum > 0.f) last = slice.begin + i;
  });
  ShareSegment(mass, last, shared);
}

/// Return the total mass of all segments; `before` becomes the mass of the segments before this warp's.
__device__ __forceinline__ uint64_t TotalMass(const RowShared& shared, uint64_t& before) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, count = ptx::ClusterSize() * warps;
  const int mine = ptx::ClusterRank() * warps + threadIdx.x / 32;
  const uint64_t a = lane < count ? shared.segment_mass[lane] : 0;
  const uint64_t b = lane + 32 < count ? shared.segment_mass[lane + 32] : 0;
  before = WarpSum((lane < mine ? a : 0) + (lane + 32 < mine ? b : 0));
  return WarpSum(a + b);
}

/// Find the column that holds unit `target` of the mass; one lane of the warp that owns it calls found(column). A
/// target above the total selects the last positive column; without any, one lane of the cluster calls found(-1).
template <bool RESIDENT, typename T, typename Found>
__device__ __forceinline__ void FindColumn(const Slice<RESIDENT, T>& slice, float threshold, int emax, uint64_t target,
                                           uint64_t before, uint64_t total, const RowShared& shared,
                                           const Found& found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int count = ptx::ClusterSize() * warps, mine = ptx::ClusterRank() * warps + warp;
  if (target > total) {
    int last = lane < count ? shared.segment_last[lane] : -1;
    if (lane + 32 < count) last = max(last, shared.segment_last[lane + 32]);
    last = WarpMax(last);
    if (last < 0) {
      if (mine == 0 && lane == 0) found(-1);
    } else if (last == shared.segment_last[mine] && lane == 0) {
      float x[4];
      slice.Read(last - slice.begin, x);
      KeptWeights(threshold, x);
      found(last + (x[3] > 0.f ? 3 : x[2] > 0.f ? 2 : x[1] > 0.f ? 1 : 0));
    }
    return;
  }
  if (target <= before || target > before + shared.segment_mass[mine]) return;
  // Each lane sums a contiguous part of the segment; then all lanes search the part that holds the target.
  const int segment = slice.SegmentSize(), end = min(slice.size, (warp + 1) * segment), part = segment / 32;
  const auto mass_of = [&](int i, float (&x)[4]) {
    if (i >= end) return uint64_t{0};
    slice.Read(i, x);
    return MassOf(KeptWeights(threshold, x), emax);
  };
  float x[4] = {};
  uint64_t mass = 0;
  const int begin = warp * segment + lane * part;
  for (int i = begin; i < min(begin + part, end); i += 4) mass += mass_of(i, x);
  uint64_t through = before + WarpInclusiveScan(mass);
  const int owner = __ffs(__ballot_sync(0xffffffffu, through >= target)) - 1;
  before = __shfl_sync(0xffffffffu, through - mass, owner);
  const int from = warp * segment + owner * part;
  for (int base = from; base < from + part; base += WARP_COLUMNS) {
    const int i = base + lane * 4;
    mass = i < from + part ? mass_of(i, x) : 0;
    through = before + WarpInclusiveScan(mass);
    const uint32_t reached = __ballot_sync(0xffffffffu, through >= target);
    if (reached != 0) {
      if (lane == __ffs(reached) - 1) found(slice.begin + i + ColumnOf(x, target - (through - mass), emax));
      return;
    }
    before = __shfl_sync(0xffffffffu, through, 31);
  }
}

}  // namespace sampling
}  // namespace flashinfer
