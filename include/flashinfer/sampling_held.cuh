// SPDX-License-Identifier: Apache-2.0
// A row that a cluster of blocks holds in shared memory while a filter is applied to it: each block has a slice, each
// warp a segment of the slice, each lane every 32nd group of four columns of the segment. A lane reads what it has
// loaded itself, so that nobody waits for the whole row.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "sampling.h"
#include "sampling_math.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int BLOCKS = 3;  // that should fit an SM, which their shared memory allows for a vocabulary of 128K
constexpr int MAX_CLUSTER = 8;
constexpr int SEGMENTS = MAX_CLUSTER * WARPS;
constexpr int WARP_COLUMNS = 128;
constexpr int MAX_SLICE = 32 * WARPS * WARP_COLUMNS;  // a lane has at most 32 groups
constexpr int FIRST_BINS = THREADS;                   // of the first histogram
constexpr int NEXT_BINS = 256;                        // of later ones
constexpr int CANDIDATES = 288;                       // columns near the threshold that block 0 can list
constexpr unsigned ALL = 0xffffffffu;

/// The shared memory of a block, before its slice.
struct alignas(16) Shared {
  uint32_t bins[2 * FIRST_BINS];  // counts, then masses
  // Of block 0: what the others tell it.
  float4 group[CANDIDATES];  // four columns of which some are near the threshold
  int32_t group_segment[CANDIDATES];
  uint64_t segment_mass[SEGMENTS];  // of what is kept for certain, but for those groups
  uint64_t segment_quanta[SEGMENTS];
  uint32_t listed;  // groups
  // What a block tells all others.
  uint32_t largest;       // key
  uint32_t is_heavy;      // masses of the first histogram may have overflowed
  uint32_t count_higher;  // columns above the bracket, and their quanta
  unsigned long long quanta_higher;
  // For the block.
  uint64_t scratch[2][WARPS];
  uint32_t cutoff;
  int32_t first_bin, last_bin;
  uint32_t count_above, count_through;
  uint64_t mass_above, mass_through;
  uint64_t random, before;
  uint64_t kept_quanta;
  uint32_t keys;
  int32_t segment;
  // What block 0 tells all others.
  uint32_t threshold;
  uint64_t total_mass;
};

template <typename T>
__device__ __forceinline__ T WarpSum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL, x, offset);
  return x;
}

template <typename T>
__device__ __forceinline__ T WarpInclusive(T x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T below = __shfl_up_sync(ALL, x, offset);
    if (int(threadIdx.x % 32) >= offset) x += below;
  }
  return x;
}

/// Sums of the threads before this one.
__device__ __forceinline__ void BlockExclusive(uint64_t& a, uint64_t& b, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t through_a = WarpInclusive(a), through_b = WarpInclusive(b);
  if (lane == 31) shared.scratch[0][warp] = through_a, shared.scratch[1][warp] = through_b;
  __syncthreads();
  a = through_a - a, b = through_b - b;
  for (int w = 0; w < warp; ++w) a += shared.scratch[0][w], b += shared.scratch[1][w];
}

/// SIGNED: columns are any floats, to be ranked; otherwise weights, of which only positive ones count.
template <bool SIGNED>
__device__ __forceinline__ uint32_t KeyOf(float x) {
  if constexpr (SIGNED) return OrderedKey(x);
  return Bits(Positive(x));
}

/// Columns [begin, begin + size) of a row.
struct Slice {
  float* held;
  int stride;  // columns of each block but the last ones
  int begin, size, segment;

  __device__ __forceinline__ Slice(float* held, int vocab) : held(held) {
    const int blocks = ptx::ClusterSize();
    stride = ((vocab + blocks - 1) / blocks + 3) & ~3;
    begin = min(int(ptx::ClusterRank()) * stride, vocab);
    size = min(stride, vocab - begin);
    segment = (stride + WARPS * WARP_COLUMNS - 1) / (WARPS * WARP_COLUMNS) * WARP_COLUMNS;
  }
  __device__ __forceinline__ int First() const { return threadIdx.x / 32 * segment + threadIdx.x % 32 * 4; }
  __device__ __forceinline__ int End() const { return min(size, int(threadIdx.x / 32 + 1) * segment); }
  __device__ __forceinline__ int Segment() const { return ptx::ClusterRank() * WARPS + threadIdx.x / 32; }

  /// f(i, x) for each of this lane's groups of four columns; i counts from the start of the slice.
  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
    const int end = End();
#pragma unroll 4
    for (int i = First(); i < end; i += WARP_COLUMNS) f(i, *reinterpret_cast<const float4*>(held + i));
  }

  /// Start to load a row; what is past its end becomes `pad`.
  template <typename T>
  __device__ __forceinline__ void StartLoad(const T* row, float pad) const {
    constexpr int BATCH = 8;
    const T* const from = row + begin;
    const bool vectorised = reinterpret_cast<uintptr_t>(from) % sizeof(Vec<T, 4>) == 0;
    const int end = End();
    for (int first = First(); first < end; first += BATCH * WARP_COLUMNS) {
      Vec<T, 4> x[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + j * WARP_COLUMNS;
        if (vectorised && i + 4 <= size && i < end) {
          if constexpr (sizeof(T) == 4) {
            ptx::CopyAsync16(uint32_t(__cvta_generic_to_shared(held + i)), from + i, true);
          } else {
            x[j] = Vec<T, 4>::Load(from + i);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + j * WARP_COLUMNS;
        if (i >= end) break;
        if (!vectorised || i + 4 > size) {
#pragma unroll
          for (int e = 0; e < 4; ++e) held[i + e] = i + e < size ? ToFloat(from[i + e]) : pad;
        } else if constexpr (sizeof(T) != 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) held[i + e] = ToFloat(x[j][e]);
        }
      }
    }
    ptx::CopyCommit();
  }
};

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
