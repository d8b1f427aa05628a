// SPDX-License-Identifier: Apache-2.0
// Verification of draft tokens (definitions and parameters: sampling.h), one cluster per request. The cluster holds the
// row of the next token; every block receives the masses of all segments, whose prefix sums select the segment of the
// sample.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "row_slices.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SEGMENTS = 64;  // upper bound of blocks times warps
/// Threads of a block, and the blocks that should fit an SM; their shared memory allows it up to a vocabulary of 128K.
constexpr int Threads(bool is_resident) { return is_resident ? 256 : 512; }
constexpr int Blocks(bool is_resident) { return is_resident ? 3 : 2; }

/// Shared memory of a block, in front of its slice.
struct alignas(16) RowShared {
  uint64_t segment_mass[SEGMENTS];
  int32_t segment_last[SEGMENTS];  // start of the last group of four with a positive weight, or -1
  float largest[MAX_CLUSTER];
  float by_warp[MAX_WARPS];
  int32_t flag;
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

template <bool RESIDENT>
__global__ void __launch_bounds__(Threads(RESIDENT), Blocks(RESIDENT))
    SpeculativeKernel(const __grid_constant__ SpeculativeParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowShared& shared = *reinterpret_cast<RowShared*>(memory);
  ptx::ClusterArrive();
  const int64_t request = blockIdx.x / ptx::ClusterSize();
  const int drafts = int(p.drafts), vocab = int(p.vocab);
  const bool is_first = ptx::ClusterRank() == 0;
  const uint64_t seed = ValueOf(p.random.seed, request), offset = ValueOf(p.random.offset, request);
  const float* const draft = p.draft_probs + request * drafts * p.vocab;
  const float* const target = p.target_probs + request * (drafts + 1) * p.vocab;
  const int32_t* const ids = p.draft_ids + request * drafts;

  // Every block finds the first rejected draft token.
  if (threadIdx.x == 0) shared.flag = drafts;
  __syncthreads();
  int passed = 0;
  for (int i = threadIdx.x; i < drafts; i += blockDim.x) {
    const int id = ids[i];
    bool accept = false;
    if (id >= 0 && id < vocab) {
      accept = RandomUnit(seed, offset + i, request) * draft[i * p.vocab + id] < target[i * p.vocab + id];
    }
    if (!accept) atomicMin(&shared.flag, i);
    passed += accept;
  }
  __syncthreads();
  const int position = shared.flag;
  if (is_first) {
    passed = int(WarpSum(uint64_t(passed)));
    if (threadIdx.x % 32 == 0 && passed != 0) atomicAdd(p.accepted + request, passed);
    if (threadIdx.x == 0) p.emitted[request] += position;
    int32_t* const out = p.out + request * (drafts + 1);
    for (int i = threadIdx.x; i <= drafts; i += blockDim.x) {
      if (i != position) out[i] = i < position ? ids[i] : -1;
    }
  }

  // The next token is sampled from the positive part of target - draft; if that is empty, from the target.
  const float* const wanted = target + position * p.vocab;
  const float* const drawn = draft + min(position, max(drafts - 1, 0)) * p.vocab;
  auto slice = SliceOf<RESIDENT>(wanted, vocab, reinterpret_cast<float*>(memory + sizeof(RowShared)), false);
  float largest = 0.f;
  for (int attempt = position < drafts ? 0 : 1; attempt < 2 && !(largest > 0.f); ++attempt) {
    const float* const minus = attempt == 0 ? drawn : nullptr;
    slice.minus = minus == nullptr ? nullptr : minus + slice.begin;
    largest = LoadSlice(
        slice, 0.f, [&](int i) { return minus == nullptr ? wanted[i] : wanted[i] - minus[i]; },
        [](int, float (&)[4]) {}, [](float x) { return x; });
    if (attempt == 1 && position < drafts)
      ptx::ClusterArrive();  // the first attempt has consumed the arrival at the start
    largest = Positive(ClusterMax(largest, shared));
  }
  const int emax = BiasedExponent(largest);
  ShareMasses(slice, 0.f, emax, shared);
  uint64_t before;
  const uint64_t total = TotalMass(shared, before);
  FindColumn(slice, 0.f, emax, TargetOf(RandomBits(seed, offset + drafts, request), total), before, total, shared,
             [&](int column) { p.out[request * (drafts + 1) + position] = max(column, 0); });
}

/// Choose how to spread rows of `vocab` columns over blocks. Results do not depend on it.
inline Geometry GeometryOf(int64_t rows, int64_t vocab, const Device& device) {
  Geometry g{1, Threads(true), true, 0};
  const auto slice = [&] { return (CeilDiv(vocab, g.cluster) + 3) / 4 * 4; };
  if (device.has_clusters) {
    // At most 16K columns per block, so that three blocks fit an SM; fewer while SMs would be idle.
    while (g.cluster < MAX_CLUSTER &&
           (slice() > 16384 || (slice() > 2048 && rows * g.cluster < 2 * device.multiprocessors))) {
      g.cluster *= 2;
    }
  }
  g.shared_bytes = sizeof(RowShared) + slice() * sizeof(float);
  if (int64_t(g.shared_bytes) > device.shared_bytes) g = {1, Threads(false), false, sizeof(RowShared)};
  return g;
}

/// Launch RESIDENT, or STREAMING where no cluster can hold a row.
template <auto RESIDENT, auto STREAMING, typename Params>
cudaError_t LaunchRows(int64_t rows, int64_t vocab, bool enable_pdl, Stream stream, const Params& params) {
  Device device;
  const cudaError_t status = PrepareKernel<RESIDENT>(device);
  if (status != cudaSuccess) return status;
  const Geometry g = GeometryOf(rows, vocab, device);
  return LaunchClusters(g.is_resident ? RESIDENT : STREAMING, g, rows, enable_pdl, stream, params);
}

}  // namespace sampling

FLASHINFER_INLINE Status ChainSpeculativeSample(const SpeculativeParams& p, Stream stream) {
  using namespace sampling;
  if (p.batch == 0) return cudaSuccess;
  return LaunchRows<SpeculativeKernel<true>, SpeculativeKernel<false>>(p.batch, p.vocab, false, stream, p);
}

}  // namespace flashinfer
