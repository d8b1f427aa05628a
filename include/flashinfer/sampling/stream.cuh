// SPDX-License-Identifier: Apache-2.0
// Draws that search no threshold (definitions and parameters: sampling.h): from all columns, or with min-p. A cluster
// of blocks reads a row once and holds nothing of it: each warp takes segments, and sends the leading block what a
// draw needs to know of them. The others are done then; the leader picks a segment and reads it again.
#pragma once
#include "../sampling.cuh"
#include "segment.cuh"

namespace flashinfer {
namespace sampling {

constexpr int STREAM_THREADS = 256;  // at most
constexpr int MAX_CHUNKS = 2048;     // whose largest weights min-p wants to know

/// f(segment, x, wait) for each segment of a row, by a warp of the cluster: x is its columns, wait() is for the first
/// block to run, which may be sent words then. All threads have arrived at the cluster's barrier once.
template <typename F>
__device__ __forceinline__ void ForEachSegment(const SegmentSource& source, float pad, const F& f) {
  const int warps = blockDim.x / 32, step = ptx::ClusterSize() * warps, count = source.Count();
  bool is_running = false;
  const auto wait = [&] {
    if (!is_running) ptx::ClusterWait();
    is_running = true;
  };
#pragma unroll 1
  for (int segment = ptx::ClusterRank() * warps + threadIdx.x / 32; segment < count; segment += step) {
    float x[VECTORS][4];
    source.Load<true>(segment, pad, x);
    f(segment, x, wait);
  }
  wait();
}

__device__ __forceinline__ uint64_t RandomOf(const SampleParams& p, int64_t output) {
  return RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
}

/// Rounding has left a target out of reach: the last positive column of `segment`, or -1 without one. By a warp.
template <typename F>
__device__ __forceinline__ void WriteLast(const SegmentSource& source, int segment, const F& write) {
  int column = -1;
#pragma unroll 1
  for (int j = VECTORS - 1; j >= 0 && segment >= 0 && column < 0; --j) {
    const int i = SegmentSource::Column(segment, j);
    float x[4];
    source.LoadFour(i, 0.f, x);
    column = WarpMax(x[3] > 0.f ? i + 3 : x[2] > 0.f ? i + 2 : x[1] > 0.f ? i + 1 : x[0] > 0.f ? i : -1);
  }
  if (threadIdx.x % 32 == 0) write(column);
}

/// One column of all.
template <bool LOGITS>
__global__ void __launch_bounds__(STREAM_THREADS, 4) StreamKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const sums = reinterpret_cast<SegmentSum*>(memory);
  __shared__ uint64_t barrier, masses[VECTORS];
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId();
  const SegmentSource source(p.input + InputRow(p, output) * p.row_stride, p.vocab);
  const int count = source.Count(), lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x == 0 && ptx::ClusterRank() == 0) ptx::ExpectBytes(&barrier, count * sizeof(SegmentSum));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  constexpr float PAD = LOGITS ? -INFINITY : 0.f;
  ForEachSegment(source, PAD, [&](int segment, float (&x)[VECTORS][4], const auto& wait) {
    SegmentSum sum{};
    if constexpr (LOGITS) {
      const LogitScale scale = ScaleOf(x);
      ForEachColumn(x, [&](float& value) { value = scale.Summand(value); });
      sum.exponent = scale.exponent;
    } else {
      float largest = 0.f;
      ForEachColumn(x, [&](float& value) {
        value = Positive(value);
        largest = fmaxf(largest, value);
      });
      sum.has_positive = __any_sync(0xffffffffu, largest > 0.f);
    }
    sum.mass = MassOfSegment(x);
    wait();
    if (lane == 0) sum.Send(sums + segment, 0, &barrier);
  });
  if (ptx::ClusterRank() != 0) return;
  const uint64_t random = RandomOf(p, output);
  ptx::WaitForBytes(&barrier);

  // The segment that holds the target, found by every warp: each lane sums up some.
  const int each = (count + 31) / 32, begin = lane * each, end = min(begin + each, count);
  float top = -INFINITY;
  if constexpr (LOGITS) {
#pragma unroll 4
    for (int s = begin; s < end; ++s) top = fmaxf(top, sums[s].exponent);
    top = WarpLargest(top);
  }
  const auto mass_of = [&](int s) { return sums[s].mass >> (LOGITS ? sums[s].ShiftTo(top) : 0); };
  uint64_t mass = 0;
  int last = -1;
#pragma unroll 4
  for (int s = begin; s < end; ++s) {
    mass += mass_of(s);
    if (!LOGITS && sums[s].has_positive) last = s;
  }
  const uint64_t through = WarpInclusiveScan(mass), total = __shfl_sync(0xffffffffu, through, 31);
  uint64_t target = TargetOf(random, LOGITS ? total : MASS_OF_ONE);
  const uint32_t reached = __ballot_sync(0xffffffffu, through >= target);
  const auto write = [&](int column) { WriteToken(p, output, column); };
  if (reached == 0) {
    if (warp == 0) WriteLast(source, WarpMax(last), write);
    return;
  }
  const int owner = __ffs(reached) - 1;
  target -= __shfl_sync(0xffffffffu, through - mass, owner);
  int segment = owner * each;
#pragma unroll 4
  for (int s = segment; s < min(owner * each + each, count) - 1; ++s) {  // no early end: loads need not wait
    const uint64_t m = mass_of(s);
    if (s == segment && m < target) target -= m, ++segment;
  }

  // The column: each warp sums up a vector of all lanes, or some.
  const LogitScale scale(LOGITS ? sums[segment].exponent : 0.f);
  const int shift = LOGITS ? scale.ShiftTo(top) : 0;
  const auto weights = [&](int j, float (&x)[4]) {
    source.LoadFour(SegmentSource::Column(segment, j), PAD, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = Positive(LOGITS ? scale.Weight(LimitLogit(x[e])) : x[e]);
  };
  float x[4];
#pragma unroll 1
  for (int j = warp; j < VECTORS; j += warps) {
    weights(j, x);
    mass = WarpMass(UnitMass(SumOf(x)));
    if (lane == 0) masses[j] = mass;
  }
  __syncthreads();
  uint64_t before = 0;
  int j = 0;
#pragma unroll
  for (int k = 0; k < VECTORS - 1; ++k) {
    const uint64_t next = before + masses[k];
    if (j == k && next >> shift < target) before = next, ++j;
  }
  if (j % warps != warp) return;
  if (warps < VECTORS) weights(j, x);
  FindInWarp(x, SegmentSource::Column(segment, j), target, shift, before, UnitMass, write);
}

/// What the leading block knows of a row with min-p. A chunk is 1, 2, 4 or 8 vectors of all lanes. Each warp of the
/// block lists what is kept of its own chunks, in the places of these.
struct Chunks {
  uint64_t masses[MAX_CHUNKS];  // of the listed ones
  uint32_t keys[MAX_CHUNKS];    // of the largest weights
  uint16_t listed[MAX_CHUNKS];
  uint64_t totals[MAX_WARPS], barrier;
};

/// One column of those from min_p times the largest on: the largest of chunks first, masses of few chunks later.
__global__ void __launch_bounds__(STREAM_THREADS, 4) MinPKernel(const __grid_constant__ SampleParams p) {
  __shared__ Chunks chunks;
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int log2_size = 0;  // vectors of a chunk
  while (source.vocab > MAX_CHUNKS * WARP_COLUMNS << log2_size) ++log2_size;
  const int per_segment = VECTORS >> log2_size, count = source.Count() * per_segment;
  if (threadIdx.x == 0 && ptx::ClusterRank() == 0) ptx::ExpectBytes(&chunks.barrier, count * sizeof(uint32_t));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  ForEachSegment(source, 0.f, [&](int segment, float (&x)[VECTORS][4], const auto& wait) {
    uint32_t key = 0;  // of chunk `lane` of the segment
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const float largest = fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3]));
      const uint32_t of_warp = WarpLargest(Bits(Positive(largest)));
      if (j >> log2_size == lane) key = max(key, of_warp);
    }
    wait();
    if (lane < per_segment) ptx::Send(chunks.keys + segment * per_segment + lane, 0, key, &chunks.barrier);
  });
  if (ptx::ClusterRank() != 0) return;

  const uint64_t random = RandomOf(p, output);
  const float min_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
  ptx::WaitForBytes(&chunks.barrier);
  uint32_t key = 0;
#pragma unroll 4
  for (int c = lane; c < count; c += 32) key = max(key, chunks.keys[c]);
  const float largest = FromBits(WarpLargest(key)), threshold = MinPThreshold(min_p, largest);
  const int emax = BiasedExponent(largest);
  const auto mass_of = [&](float sum) { return MassOf(sum, emax); };
  const auto column_of = [&](int chunk, int j) { return ((chunk << log2_size) + j) * WARP_COLUMNS + lane * 4; };
  const auto keep = [&](float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = x[e] >= threshold ? Positive(x[e]) : 0.f;
  };

  // What is kept of this warp's chunks, and what it weighs.
  const int each = (count + warps * 32 - 1) / (warps * 32) * 32, begin = warp * each;
  uint16_t* const listed = chunks.listed + begin;
  uint64_t* const masses = chunks.masses + begin;
  int size = 0;
#pragma unroll 1
  for (int base = begin; base < min(begin + each, count); base += 32) {
    const int c = base + lane;
    const uint32_t of_chunk = c < count ? chunks.keys[c] : 0;
    const bool is_kept = of_chunk > 0 && FromBits(of_chunk) >= threshold;
    const uint32_t those = __ballot_sync(0xffffffffu, is_kept);
    if (is_kept) listed[size + __popc(those & ((1u << lane) - 1))] = uint16_t(c);
    size += __popc(those);
  }
  __syncwarp();
  constexpr int AT_ONCE = 4;
  uint64_t total = 0;
#pragma unroll 1
  for (int base = 0; base < size; base += AT_ONCE) {
    uint64_t mass[AT_ONCE] = {};
#pragma unroll 1
    for (int j = 0; j < 1 << log2_size; ++j) {
      float x[AT_ONCE][4];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) source.LoadFour(column_of(listed[min(base + k, size - 1)], j), 0.f, x[k]);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        keep(x[k]);
        mass[k] += mass_of(SumOf(x[k]));
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (base + k < size) {
        mass[k] = WarpMass(mass[k]);
        total += mass[k];
        if (lane == 0) masses[base + k] = mass[k];
      }
    }
  }
  if (lane == 0) chunks.totals[warp] = total;
  __syncthreads();
  uint64_t before = 0, of_row = 0;
#pragma unroll 1
  for (int w = 0; w < warps; ++w) {
    if (w == warp) before = of_row;
    of_row += chunks.totals[w];
  }
  if (of_row == 0) {
    if (threadIdx.x == 0) WriteToken(p, output, -1);
    return;
  }
  const uint64_t target = TargetOf(random, of_row);
  if (target <= before || target > before + total) return;

  // This warp has it.
  int chunk = 0;
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
    float x[4];
    source.LoadFour(column_of(chunk, j), 0.f, x);
    keep(x);
    const auto write = [&](int column) { WriteToken(p, output, column); };
    if (FindInWarp(x, column_of(chunk, j), target, 0, before, mass_of, write)) return;
  }
}

template <auto KERNEL>
cudaError_t LaunchStream(const SampleParams& p, bool needs_sums, Stream stream) {
  cudaError_t status;
  const Device& device = Device::Current(status);
  if (status != cudaSuccess) return status;
  bool has_cluster_code = false;
  status = PrepareKernel<KERNEL, false>(device, has_cluster_code);
  if (status != cudaSuccess) return status;
  const int64_t segments = CeilDiv(p.vocab, SEGMENT), most_warps = STREAM_THREADS / 32;
  Geometry g{1, 0, false, needs_sums ? segments * sizeof(SegmentSum) : 0};
  // A warp has up to two segments; fewer while SMs would idle.
  while (has_cluster_code && g.cluster < MAX_CLUSTER &&
         (segments > 2 * most_warps * g.cluster ||
          (segments > 2 * g.cluster && p.batch * g.cluster < 4 * device.multiprocessors))) {
    g.cluster *= 2;
  }
  g.threads = 32 * int(std::min(CeilDiv(segments, g.cluster), most_warps));
  return LaunchClusters(KERNEL, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace sampling

FLASHINFER_INLINE Status Sample(const SampleParams& p, Stream stream) {
  using namespace sampling;
  if (p.filter.filter == Filter::kMinP) return LaunchStream<MinPKernel>(p, false, stream);
  if (p.is_logits) return LaunchStream<StreamKernel<true>>(p, true, stream);
  return LaunchStream<StreamKernel<false>>(p, true, stream);
}

}  // namespace flashinfer
