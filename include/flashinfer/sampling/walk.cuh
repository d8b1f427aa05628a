// SPDX-License-Identifier: Apache-2.0
// Draws from probabilities (definitions and parameters: sampling.h) of many rows. What is drawn is known before the row
// is: so much of a mass of one. A block, or a cluster of them, reads the row in turns, from its first column on, until
// that much has been seen: on average half of it. Equal to what the same draw takes from the whole row (stream.cuh).
// H200, vocabulary 128256, us at 48 / 64 / 128 / 256 / 512 / 1024 rows: 12.8 / 14.6 / 19.4 / 29.1 / 47.1 / 84.2, where
// reading rows as a whole takes 14.3 / 16.6 / 24.5 / 39.3 / 70.9 / 131.8. (The next turn's segments on their way while a
// turn is summed up: 33.8 instead of 35.3 at 320 rows, but 48.3 and 87.5 at 512 and 1024.)
#pragma once
#include "pick.cuh"

namespace flashinfer {
namespace sampling {

constexpr int WALK_WARPS = 16;     // of a block, at most
constexpr int WALK_SEGMENTS = 64;  // of a turn, at most

/// What a turn has seen: the mass, and the last segment of those with a positive weight, or -1.
struct Seen {
  uint64_t mass;
  int last;
};

/// By a warp, of up to WALK_SEGMENTS sums.
__device__ __forceinline__ Seen SeenIn(const SegmentSum* sums, int count) {
  const int lane = threadIdx.x % 32;
  uint64_t mass = 0;
  uint32_t last = 0;
#pragma unroll
  for (int s = lane; s < WALK_SEGMENTS; s += 32) {
    if (s < count) {
      mass += sums[s].mass;
      if (sums[s].has_positive) last = s + 1;
    }
  }
  return {WarpMass(mass), int(WarpLargest(last)) - 1};
}

/// One column.
__global__ void __launch_bounds__(WALK_WARPS * 32, 2) WalkKernel(const __grid_constant__ SampleParams p) {
  __shared__ SegmentSum sums[2][WALK_SEGMENTS];  // of this turn, and of the one before or after it
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
  const uint64_t unit = TargetOf(RandomOf(p, output), MASS_OF_ONE);  // that is drawn
  uint64_t before = 0;                                               // the mass of earlier turns
  int last = -1;                                                     // their last segment with a positive weight
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
  Pick<false> pick(sums[turn % 2], min(step, count - first));
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
