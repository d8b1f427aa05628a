// SPDX-License-Identifier: Apache-2.0
// Sampling with min-p from many rows (definitions and parameters: sampling.h). A cluster reads a row once and sends the
// largest weights of chunks to its leading block; the leader reads only those chunks again that contain a kept column.
// For few rows, where blocks may wait for each other: sample_unfiltered.cuh.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "row_segments.cuh"

namespace flashinfer {
namespace sampling {

constexpr int UNFILTERED_THREADS = 256;  // upper bound
constexpr int MIN_P_WARPS = 32;          // warps of a block that has an SM to itself
constexpr int MAX_CHUNKS = 2048;         // upper bound of the chunks of a row

/// The filter of min-p for one row.
struct MinPFilter {
  float threshold;
  int emax;

  __device__ __forceinline__ MinPFilter(float min_p, float largest)
      : threshold(MinPThreshold(min_p, largest)), emax(BiasedExponent(largest)) {}

  __device__ __forceinline__ float operator()(float x) const { return x >= threshold ? Positive(x) : 0.f; }
  __device__ __forceinline__ uint64_t Mass(float sum) const { return MassOf(sum, emax); }
};

/// The leading block's view of a row. A chunk is 1, 2, 4 or 8 vectors of all lanes. Each warp of the block lists the
/// kept chunks among its own, in its part of the arrays.
struct Chunks {
  uint64_t masses[MAX_CHUNKS];  // masses of the listed chunks
  uint32_t keys[MAX_CHUNKS];    // keys of the largest weights of chunks
  uint16_t listed[MAX_CHUNKS];
  uint64_t totals[MIN_P_WARPS], barrier;
  uint32_t tops[MAX_CHUNKS];  // keys of the largest weights of segments
};

/// Kept chunks of one warp; functions are called by all lanes.
struct KeptChunks {
  const SegmentSource& source;
  const MinPFilter& filter;
  int log2_size;     // vectors of a chunk
  uint16_t* listed;  // chunks
  uint64_t* masses;  // their masses
  int size = 0;      // number of kept chunks
  static constexpr int AT_ONCE = 4;
  float x[AT_ONCE][4];  // vectors that were loaded last

  /// Return the first column of this lane's vector j of a chunk.
  __device__ __forceinline__ int Column(int chunk, int j) const {
    return ((chunk << log2_size) + j) * WARP_COLUMNS + threadIdx.x % 32 * 4;
  }
  __device__ __forceinline__ void Keep(float (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = filter(x[e]);
  }

  /// Compute the masses of all listed chunks; return their sum.
  __device__ __forceinline__ uint64_t Sum() {
    uint64_t total = 0;
#pragma unroll 1
    for (int base = 0; base < size; base += AT_ONCE) {
      uint64_t mass[AT_ONCE] = {};
#pragma unroll 1
      for (int j = 0; j < 1 << log2_size; ++j) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) source.LoadFour(Column(listed[min(base + k, size - 1)], j), 0.f, x[k]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
          Keep(x[k]);
          mass[k] += filter.Mass(SumOf(x[k]));
        }
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        if (base + k < size) {
          mass[k] = WarpMass(mass[k]);
          total += mass[k];
          if (threadIdx.x % 32 == 0) masses[base + k] = mass[k];
        }
      }
    }
    return total;
  }

  /// The lane that holds `target` calls found(column). `before`: mass of other warps' chunks.
  template <typename F>
  __device__ __forceinline__ void Find(uint64_t target, uint64_t before, const F& found) const {
    const int lane = threadIdx.x % 32;
    const auto mass_of = [&](float sum) { return filter.Mass(sum); };
    int chunk = listed[0];
    if (size <= AT_ONCE && log2_size == 0) {  // all chunks are in registers
      float four[4] = {x[0][0], x[0][1], x[0][2], x[0][3]};
      uint64_t through = before + masses[0];
#pragma unroll
      for (int k = 1; k < AT_ONCE; ++k) {
        const bool is_later = k < size && through < target;
        if (is_later) before = through, through += masses[k], chunk = listed[k];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = is_later ? x[k][e] : four[e];
      }
      FindInWarp(four, Column(chunk, 0), target, 0, before, mass_of, found);
      return;
    }
#pragma unroll 1
    for (int base = 0; base < size; base += 32) {
      const uint64_t mass = base + lane < size ? masses[base + lane] : 0, through = before + WarpInclusiveScan(mass);
      const uint32_t reached = __ballot_sync(0xffffffffu, through >= target);
      const int at = reached == 0 ? 31 : __ffs(reached) - 1;
      before = __shfl_sync(0xffffffffu, reached == 0 ? through : through - mass, at);
      chunk = listed[min(base + at, size - 1)];
      if (reached != 0) break;
    }
#pragma unroll 1
    for (int j = 0; j < 1 << log2_size; ++j) {
      float four[4];
      source.LoadFour(Column(chunk, j), 0.f, four);
      Keep(four);
      if (FindInWarp(four, Column(chunk, j), target, 0, before, mass_of, found)) return;
    }
  }
};

/// Sample one column with min-p: maxima of all chunks first, then masses of the few kept chunks.
__global__ void __launch_bounds__(MIN_P_WARPS * 32, 1) MinPKernel(const __grid_constant__ SampleParams p) {
  __shared__ Chunks chunks;
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int log2_size = 0;  // vectors of a chunk
  while (source.vocab > MAX_CHUNKS * WARP_COLUMNS << log2_size) ++log2_size;
  const int segments = source.Count(), per_segment = VECTORS >> log2_size, count = segments * per_segment;
  if (ptx::ClusterRank() == 0) ptx::ExpectBytes(&chunks.barrier, (count + segments) * sizeof(uint32_t));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  float x[VECTORS][4];
  uint64_t random = 0;
  const auto prepare = [&] {
    if (ptx::ClusterRank() == 0) random = RandomOf(p, output);
  };
  ForEachSegment<false>(source, 0.f, x, prepare, [&](int segment, const auto& wait, const auto&) {
    uint32_t key = 0, top = 0;  // largest key of chunk `lane`, and of the segment
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const float largest = fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3]));
      const uint32_t of_warp = WarpLargest(Bits(Positive(largest)));
      if (j >> log2_size == lane) key = max(key, of_warp);
      top = max(top, of_warp);
    }
    wait();
    if (lane == 31) ptx::Send(chunks.tops + segment, 0, top, &chunks.barrier);
    if (lane < per_segment) ptx::Send(chunks.keys + segment * per_segment + lane, 0, key, &chunks.barrier);
  });
  if (ptx::ClusterRank() != 0) return;

  const float min_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
  ptx::WaitForBytes(&chunks.barrier);
  const int each = (count + warps * 32 - 1) / (warps * 32) * 32;  // chunks per warp
  const int begin = warp * each, end = min(begin + each, count);
  uint32_t top = 0;
#pragma unroll 4
  for (int s = lane; s < segments; s += 32) top = max(top, chunks.tops[s]);
  const MinPFilter filter(min_p, FromBits(WarpLargest(top)));

  // List this warp's kept chunks and sum their masses.
  KeptChunks kept{source, filter, log2_size, chunks.listed + begin, chunks.masses + begin};
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const int c = base + lane;
    const uint32_t of_chunk = c < count ? chunks.keys[c] : 0;
    const bool is_kept = filter(FromBits(of_chunk)) > 0.f;
    const uint32_t those = __ballot_sync(0xffffffffu, is_kept);
    if (is_kept) kept.listed[kept.size + __popc(those & ((1u << lane) - 1))] = uint16_t(c);
    kept.size += __popc(those);
  }
  __syncwarp();
  const uint64_t total = kept.Sum();
  if (lane == 0) chunks.totals[warp] = total;
  __syncthreads();
  const uint64_t through = WarpInclusiveScan(lane < warps ? chunks.totals[lane] : 0);
  const uint64_t of_row = __shfl_sync(0xffffffffu, through, 31);
  const uint64_t before = __shfl_sync(0xffffffffu, through, warp) - total;
  if (of_row == 0) {
    if (threadIdx.x == 0) WriteToken(p, output, -1);
    return;
  }
  const uint64_t target = TargetOf(random, of_row);
  if (target <= before || target > before + total) return;
  kept.Find(target, before, [&](int column) { WriteToken(p, output, column); });
}

}  // namespace sampling
}  // namespace flashinfer
