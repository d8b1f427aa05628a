// SPDX-License-Identifier: Apache-2.0
// A row of which each block of a cluster owns one slice, in shared memory (RESIDENT: the row is read from DRAM once)
// or, where no cluster can hold the row, in global memory. Within the slice each warp owns a contiguous segment.
#pragma once
#include "../sampling.cuh"

namespace flashinfer {
namespace sampling {

constexpr int IN_FLIGHT = 8;  // vectors that a thread loads before it uses the first one

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

/// Zero the weights of a group below `threshold`; return the sum of the others.
__device__ __forceinline__ float KeptWeights(float threshold, float (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float weight = Positive(x[j]);
    x[j] = weight >= threshold ? weight : 0.f;
  }
  return Sum4(x[0], x[1], x[2], x[3]);
}

}  // namespace sampling
}  // namespace flashinfer
