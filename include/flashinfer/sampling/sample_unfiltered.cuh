// SPDX-License-Identifier: Apache-2.0
// Sampling without a threshold search (definitions and parameters: sampling.h): from all columns, or with min-p from
// few rows (sample_min_p.cuh: many rows). Two kernels with equal results:
//   UnfilteredKernel   A cluster reads a row once and holds nothing of it: each warp sums its segments and sends the
//                      sums to the leading block, which selects a segment and reads it again.
//   EarlyExitKernel    Many rows of probabilities. The sampled unit of mass is known before the row is read, since the
//                      total mass is one. A block or a cluster reads the row in passes, from the first column on, until
//                      that mass has been seen: half of the row on average.
// Measurements: docs/performance/sampling.md.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "row_segments.cuh"
#include "sample_min_p.cuh"

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

/// Sample one column; reading stops early.
__global__ void __launch_bounds__(EARLY_EXIT_WARPS * 32, 2) EarlyExitKernel(const __grid_constant__ SampleParams p) {
  __shared__ SegmentSum sums[2][EARLY_EXIT_SEGMENTS];  // double buffer: this pass and the next
  __shared__ uint64_t barriers[2], masses[VECTORS];
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const int blocks = ptx::ClusterSize(), warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = source.Count(), step = blocks * warps, mine = ptx::ClusterRank() * warps + warp;
  const auto bytes_from = [&](int first) { return uint32_t(min(step, count - first) * sizeof(SegmentSum)); };
  ptx::ExpectBytes(&barriers[0], bytes_from(0));
  if (step < count) ptx::ExpectBytes(&barriers[1], bytes_from(step));
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

constexpr int TWO_WARPS = 16;  // warps per block in a cluster of two

enum class From { kProbs, kLogits, kMinP };

/// Sum this warp's segments of probabilities or logits; send(segment, sum) is called for each.
template <bool LOGITS, typename Meanwhile, typename Top, typename Send>
__device__ __forceinline__ void SendSums(const SegmentSource& source, const Meanwhile& meanwhile, const Top& top_of_row,
                                         const Send& send) {
  float x[VECTORS][4];
  constexpr float PAD = LOGITS ? -INFINITY : 0.f;
  ForEachSegment<true>(source, PAD, x, meanwhile, [&](int segment, const auto& wait, const auto& refill) {
    const SegmentSum sum = SumOfSegment<LOGITS>(x, top_of_row, refill);
    wait();
    send(segment, sum);
  });
}

/// Sum the columns that min-p keeps, from the last segment, `held`, which is in x, backwards. `keys`: largest weights
/// of segments.
template <typename Send>
__device__ __forceinline__ void SendKept(const SegmentSource& source, const MinPFilter& filter, const uint32_t* keys,
                                         int warps, int held, float (&x)[VECTORS][4], const Send& send) {
#pragma unroll 1
  for (int segment = held; segment >= 0; segment -= ptx::ClusterSize() * warps) {
    SegmentSum sum{};
    if (filter(FromBits(keys[segment])) > 0.f) {
      if (segment != held) source.Load<false>(segment, 0.f, x);
      ForEachColumn(x, [&](float& value) { value = filter(value); });
      uint64_t mass = 0;
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) mass += filter.Mass(SumOf(x[j]));
      sum.mass = WarpMass(mass);
    }
    send(segment, sum);
  }
}

/// Sample one column. kMinP is for few rows: the largest weights of all segments, `keys`, are sent to all blocks, which
/// wait for them; then each warp sums the kept columns of its own segments.
template <From FROM>
__global__ void __launch_bounds__(TWO_WARPS * 32, 2) UnfilteredKernel(const __grid_constant__ SampleParams p) {
  constexpr bool LOGITS = FROM == From::kLogits, MIN_P = FROM == From::kMinP;
  constexpr float PAD = LOGITS ? -INFINITY : 0.f;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const sums = reinterpret_cast<SegmentSum*>(memory);
  __shared__ uint64_t barrier, keys_barrier, masses[VECTORS];
  ptx::GridDependencyWait();
  const int64_t output = ptx::ClusterId(), row = InputRow(p, output);
  const SegmentSource source(p.input + row * p.row_stride, p.vocab);
  const int count = source.Count(), lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  auto* const keys = reinterpret_cast<uint32_t*>(sums + count);
  if (MIN_P) ptx::ExpectBytes(&keys_barrier, count * sizeof(uint32_t));
  if (ptx::ClusterRank() == 0) ptx::ExpectBytes(&barrier, count * sizeof(SegmentSum));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  const auto send = [&](int segment, const SegmentSum& sum) {
    if (lane == 0) sum.Send(sums + segment, 0, &barrier);
  };
  const auto top_of_row = [&] { return LargestProductApart(source, 1.f); };
  MinPFilter filter(0.f, 0.f);
  uint64_t random = 0;
  const auto draw = [&] {
    if (ptx::ClusterRank() == 0) random = RandomOf(p, output);
  };
  if constexpr (MIN_P) {
    float x[VECTORS][4];
    const int held = ForEachSegment<false>(source, PAD, x, draw, [&](int segment, const auto& wait, const auto&) {
      const uint32_t key = WarpLargest(Bits(Positive(LargestOf(x))));
      wait();
      if (lane < int(ptx::ClusterSize())) ptx::Send(keys + segment, lane, key, &keys_barrier);
    });
    const float min_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
    ptx::WaitForBytes(&keys_barrier);
    uint32_t key = 0;
#pragma unroll 4
    for (int s = lane; s < count; s += 32) key = max(key, keys[s]);
    filter = MinPFilter(min_p, FromBits(WarpLargest(key)));
    SendKept(source, filter, keys, warps, held, x, send);
  } else {
    SendSums<LOGITS>(source, draw, top_of_row, send);
  }
  // One warp per vector of the segment is enough; in a cluster of one block, all warps wait for each other first.
  if (ptx::ClusterRank() != 0 || (warp >= VECTORS && ptx::ClusterSize() > 1)) return;
  SegmentPicker<LOGITS> pick(sums, count);
  ptx::WaitForBytes(&barrier);
  if (warp >= VECTORS) return;
  pick.Sum();
  const auto write = [&](int column) { WriteToken(p, output, column); };
  if (!pick.Find(TargetOf(random, FROM == From::kProbs ? MASS_OF_ONE : pick.Total()))) {
    if (warp == 0) WriteLast(source, pick.Last(), write);
    return;
  }

  const SegmentSum& picked = sums[pick.segment];
  const LogitScale scale = LogitScale::Of(LOGITS ? picked.exponent : 0, top_of_row);
  const auto weights_of = [&](int j, float (&four)[4]) {
    source.LoadFour(SegmentSource::Column(pick.segment, j), PAD, four);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (LOGITS && scale.IsFar()) four[e] = scale.Brought(four[e]);
      four[e] = MIN_P ? filter(four[e]) : Positive(LOGITS ? scale.Weight(four[e]) : four[e]);
    }
  };
  const auto mass_of = [&](float sum) { return MIN_P ? filter.Mass(sum) : UnitMass(sum); };
  const auto found = [&](int j, int column) { write(SegmentSource::Column(pick.segment, j) + column); };
  FindInSegment(pick.target, LOGITS ? picked.ShiftTo(pick.top) : 0, warp, warps, masses, weights_of, mass_of, found);
}

/// Choose how a cluster shares a row.
template <auto KERNEL>
cudaError_t UnfilteredGeometry(const SampleParams& p, Device& device, Geometry& g) {
  const cudaError_t status = PrepareKernel<KERNEL, false>(device);
  const int64_t segments = CeilDiv(p.vocab, SEGMENT), most_warps = UNFILTERED_THREADS / 32;
  g = {1, 0, false, 0};
  // A warp has up to two segments; one while SMs would be idle. Smaller blocks are slower.
  while (device.has_clusters && g.cluster < MAX_CLUSTER &&
         (segments > 2 * most_warps * g.cluster ||
          (segments > most_warps * g.cluster && p.batch * g.cluster < 4 * device.multiprocessors))) {
    g.cluster *= 2;
  }
  // Few rows get one of the largest clusters each.
  if (g.cluster == MAX_CLUSTER && segments > most_warps * MAX_CLUSTER &&
      p.batch * 2 * MAX_CLUSTER <= device.multiprocessors) {
    g.cluster = LargestCluster<KERNEL>(UNFILTERED_THREADS, 0);
  }
  // Warps without a segment help to find the column, as long as their blocks are resident.
  const bool has_all = g.cluster == 1 && p.batch <= 4 * device.multiprocessors;
  g.threads = 32 * int(has_all ? most_warps : std::min(CeilDiv(segments, g.cluster), most_warps));
  return status;
}

/// Use clusters of fewer blocks if all rows then start at once and most SMs have equally many of them. Two blocks fit
/// any SM; of 64 clusters of eight, two start when others have finished. Measurements: docs/performance/sampling.md.
template <From FROM>
bool HasFewBlocks(int64_t batch, int64_t segments, const Device& device, Geometry& g) {
  const int64_t waves = CeilDiv(2 * batch, device.multiprocessors);
  if (!device.has_clusters || waves > 2) return false;
  const bool are_two = 20 * batch >= 7 * waves * device.multiprocessors;
  if (!are_two && (waves == 1 || FROM != From::kLogits || segments <= 64)) return false;
  constexpr int64_t LEAST = FROM == From::kLogits ? 2 * TWO_WARPS : TWO_WARPS;
  if (segments < LEAST || (FROM == From::kMinP && segments > 2 * TWO_WARPS)) return false;
  g.cluster = are_two ? 2 : 4;
  const int64_t of_block = CeilDiv(segments, g.cluster), most_warps = 2 * TWO_WARPS / g.cluster;
  g.threads = 32 * int(CeilDiv(of_block, CeilDiv(of_block, most_warps)));
  return true;
}

/// True if rows should be read in passes with early exit: there are enough rows and passes.
/// Each row gets as many warps as are resident at once.
inline bool EarlyExitGeometry(int64_t batch, int64_t segments, const Device& device, Geometry& g) {
  const int64_t running = 32 * device.multiprocessors;
  int warps = EARLY_EXIT_SEGMENTS;
  while (warps > 8 && batch * warps > running) warps /= 2;
  if (batch * segments < running || 2 * segments < 3 * warps) return false;
  const bool is_block = warps <= EARLY_EXIT_WARPS || !device.has_clusters;
  g = is_block ? Geometry{1, 32 * std::min(warps, EARLY_EXIT_WARPS), false, 0} : Geometry{warps / 8, 256, false, 0};
  return true;
}

template <From FROM>
cudaError_t LaunchUnfiltered(const SampleParams& p, Stream stream) {
  Device device;
  Geometry g;
  cudaError_t status = UnfilteredGeometry<UnfilteredKernel<FROM>>(p, device, g);
  if (status != cudaSuccess) return status;
  const int64_t segments = CeilDiv(p.vocab, SEGMENT);
  const size_t bytes = sizeof(SegmentSum) + (FROM == From::kMinP ? sizeof(uint32_t) : 0);
  g.shared_bytes = segments * bytes;
  if constexpr (FROM == From::kProbs) {
    if (EarlyExitGeometry(p.batch, segments, device, g)) {
      return LaunchClusters(EarlyExitKernel, g, p.batch, p.enable_pdl, stream, p);
    }
  } else if (HasFewBlocks<FROM>(p.batch, segments, device, g)) {
    return LaunchClusters(UnfilteredKernel<FROM>, g, p.batch, p.enable_pdl, stream, p);
  }
  // Blocks that wait for each other cost nothing as long as no others wait to become resident; beyond that MinPKernel
  // is faster, with two blocks that fill SMs where that takes most SMs.
  if (FROM == From::kMinP) {
    const bool has_two = device.has_clusters && segments >= 2 * MIN_P_WARPS && 2 * p.batch <= device.multiprocessors &&
                         5 * p.batch >= 2 * device.multiprocessors;
    const bool is_held = 32 * segments <= g.cluster * g.threads, is_alone = g.cluster == 1;
    if (has_two || (is_alone ? !is_held : p.batch * g.cluster > 4 * device.multiprocessors)) {
      status = UnfilteredGeometry<MinPKernel>(p, device, g);
      if (has_two) g.cluster = 2, g.threads = MIN_P_WARPS * 32;
      return status == cudaSuccess ? LaunchClusters(MinPKernel, g, p.batch, p.enable_pdl, stream, p) : status;
    }
  }
  return LaunchClusters(UnfilteredKernel<FROM>, g, p.batch, p.enable_pdl, stream, p);
}

}  // namespace sampling

FLASHINFER_INLINE Status Sample(const SampleParams& p, Stream stream) {
  using namespace sampling;
  if (p.filter.filter == Filter::kMinP) return LaunchUnfiltered<From::kMinP>(p, stream);
  return p.is_logits ? LaunchUnfiltered<From::kLogits>(p, stream) : LaunchUnfiltered<From::kProbs>(p, stream);
}

}  // namespace flashinfer
