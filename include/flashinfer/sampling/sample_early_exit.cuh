// SPDX-License-Identifier: Apache-2.0
// Sampling from probabilities of many rows with early exit (definitions and parameters: sampling.h). The sampled unit
// of mass is known before the row is read, since the total mass is one. A block or a cluster reads the row in passes,
// from the first column on, until that mass has been seen: half of the row on average. The result equals that of
// sample_unfiltered.cuh. Measurements: docs/performance/sampling.md.
#pragma once
#include "inverse_transform.cuh"

namespace flashinfer {
namespace sampling {

constexpr int EARLY_EXIT_WARPS = 16;     // upper bound of warps per block
constexpr int EARLY_EXIT_SEGMENTS = 64;  // upper bound of segments per pass

/// Sums of one pass: the mass, and the last segment with a positive weight, or -1.
struct Seen {
  uint64_t mass;
  int last;
};

/// Combine up to EARLY_EXIT_SEGMENTS sums, by one warp.
__device__ __forceinline__ Seen SeenIn(const SegmentSum* sums, int count) {
  const int lane = threadIdx.x % 32;
  uint64_t mass = 0;
  uint32_t last = 0;
#pragma unroll
  for (int s = lane; s < EARLY_EXIT_SEGMENTS; s += 32) {
    if (s < count) {
      mass += sums[s].mass;
      if (sums[s].has_positive) last = s + 1;
    }
  }
  return {WarpMass(mass), int(WarpLargest(last)) - 1};
}

/// Sample one column.
__global__ void __launch_bounds__(EARLY_EXIT_WARPS * 32, 2) EarlyExitKernel(const __grid_constant__ SampleParams p) {
  __shared__ SegmentSum sums[2][EARLY_EXIT_SEGMENTS];  // double buffer: this pass and the next
  __shared__ uint64_t barriers[2], masses[VECTORS];
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const int blocks = ptx::ClusterSize(), warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = source.Count(), step = blocks * warps, mine = ptx::ClusterRank() * warps + warp;
  const auto bytes_from = [&](int first) { return uint32_t(min(step, count - first) * sizeof(SegmentSum)); };
  if (threadIdx.x == 0) {
    ptx::ExpectBytes(&barriers[0], bytes_from(0));
    if (step < count) ptx::ExpectBytes(&barriers[1], bytes_from(step));
  }
  __syncwarp();
  ptx::ClusterArriveRelaxed();

  float x[VECTORS][4];
  int first = 0, turn = 0;
  const auto load = [&] {
    if (first + mine < count) source.Load<true>(first + mine, 0.f, x);
  };
  load();
  const uint64_t unit = TargetOf(RandomOf(p, output), MASS_OF_ONE);  // the sampled unit of mass
  uint64_t before = 0;                                               // mass of earlier passes
  int last = -1;  // last segment with a positive weight in earlier passes
  bool is_seen = false;
#pragma unroll 1
  while (true) {
    SegmentSum sum{};
    if (first + mine < count) sum = SumOfSegment<false>(x, [] { return 0.f; }, [](int) {});
    if (turn == 0) ptx::ClusterWait();  // every block runs
    if (first + mine < count && lane < blocks) sum.Send(&sums[turn % 2][mine], lane, &barriers[turn % 2]);
    ptx::WaitForBytes(&barriers[turn % 2], turn / 2);
    const Seen seen = SeenIn(sums[turn % 2], min(step, count - first));
    is_seen = before + seen.mass >= unit;
    if (is_seen) break;
    if (seen.last >= 0) last = first + seen.last;
    if (first + step >= count) break;
    if (threadIdx.x == 0 && first + 2 * step < count) {
      ptx::ExpectMoreBytes(&barriers[turn % 2], bytes_from(first + 2 * step));
    }
    before += seen.mass, first += step, ++turn;
    load();
  }

  if (ptx::ClusterRank() != 0 || warp >= VECTORS) return;
  const auto write = [&](int column) { WriteToken(p, output, column); };
  if (!is_seen) {
    if (warp == 0) WriteLast(source, last, write);
    return;
  }
  SegmentPicker<false> pick(sums[turn % 2], min(step, count - first));
  pick.Sum();
  pick.Find(unit - before);
  const int segment = first + pick.segment;
  const auto weights_of = [&](int j, float (&four)[4]) {
    source.LoadFour(SegmentSource::Column(segment, j), 0.f, four);
#pragma unroll
    for (int e = 0; e < 4; ++e) four[e] = Positive(four[e]);
  };
  const auto found = [&](int j, int column) { write(SegmentSource::Column(segment, j) + column); };
  FindInSegment(pick.target, 0, warp, warps, masses, weights_of, [](float sum) { return UnitMass(sum); }, found);
}

}  // namespace sampling
}  // namespace flashinfer
