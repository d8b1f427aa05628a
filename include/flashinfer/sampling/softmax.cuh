// SPDX-License-Identifier: Apache-2.0
// Softmax (definition and parameters: sampling.h). A cluster per row: each warp holds the weights of its segments,
// sends their sums to all blocks, and writes the weights divided by the total. Up to 256 segments (a vocabulary of
// 262144) are held in registers, one per warp of 16 blocks; longer rows in shared memory; otherwise rows are read
// twice. Several blocks share an SM, so that one loads while others compute and store. Measurements:
// docs/performance/sampling.md.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "../ptx/cp_async.cuh"
#include "row_segments.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SOFTMAX_WARPS = 8;  // warps per block; blocks that hold segments in registers may have more
constexpr int HELD_WARPS = 10, LONG_WARPS = 16;
constexpr int SOFTMAX_HELD = 24;  // segments in the shared memory of a block; two blocks fit an SM

enum class Hold { kRegisters, kShared, kNothing };

/// Segments of a warp in shared memory. Each lane reads only what it has loaded itself.
struct HeldSegments {
  float* first;  // first column of this lane

  static __device__ __forceinline__ int Column(int j) { return j * WARP_COLUMNS; }

  __device__ __forceinline__ void Fetch(const SegmentSource& source, int segment, int slot) const {
    float* const to = first + slot * SEGMENT;
    const bool is_whole = source.aligned && (segment + 1) * SEGMENT <= source.vocab;
    if (is_whole) {
      const uint32_t address = uint32_t(__cvta_generic_to_shared(to));
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
        ptx::CopyAsync16(address + Column(j) * sizeof(float), source.row + SegmentSource::Column(segment, j), true);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < VECTORS; ++j) {
        float x[4];
        source.LoadFour(SegmentSource::Column(segment, j), -INFINITY, x);
        RoundTo<float, 4>(x).Store(to + Column(j));
      }
    }
    ptx::CopyCommit();
  }

  /// Read a slot after which `more` slots have been fetched.
  __device__ __forceinline__ void Read(int slot, int more, float (&x)[VECTORS][4]) const {
    if (more == 0) {
      ptx::CopyWait<0>();
    } else if (more == 1) {
      ptx::CopyWait<1>();
    } else {
      ptx::CopyWait<2>();
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) LoadFloats(first + slot * SEGMENT + Column(j), x[j]);
  }

  __device__ __forceinline__ void Write(int slot, const float (&x)[VECTORS][4]) const {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) RoundTo<float, 4>(x[j]).Store(first + slot * SEGMENT + Column(j));
  }
};

/// Return the bytes of shared memory for the segments of a block; the sums follow them.
FLASHINFER_HD size_t SoftmaxHeldBytes(int count, int blocks, int warps) {
  return size_t((count + blocks * warps - 1) / (blocks * warps)) * warps * SEGMENT * sizeof(float);
}

/// Return the exponent that the sums of a row are relative to; `total` becomes their sum. By one warp. FEW: the sum of
/// a lane is below 2^54.
template <bool FEW>
__device__ __forceinline__ int SumUp(const SegmentSum* sums, int count, uint64_t& total) {
  const int lane = threadIdx.x % 32;
  int top = LEAST_EXPONENT;
#pragma unroll 4
  for (int s = lane; s < count; s += 32) top = max(top, sums[s].exponent);
  top = WarpLargest(top);
  total = 0;
#pragma unroll 4
  for (int s = lane; s < count; s += 32) total += sums[s].mass >> sums[s].ShiftTo(top);
  total = FEW ? WarpMass(total) : WarpSum(total);
  return top;
}

/// Store a segment of a row of `vocab` columns.
__device__ __forceinline__ void StoreSegment(const float (&x)[VECTORS][4], float* out, bool aligned, int segment,
                                             int vocab) {
  const bool is_whole = aligned && (segment + 1) * SEGMENT <= vocab;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int column = SegmentSource::Column(segment, j);
    if (is_whole) {
      RoundTo<float, 4>(x[j]).Store(out + column);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e < vocab) out[column + e] = x[j][e];
      }
    }
  }
}

template <Hold HOLD, int WARPS = SOFTMAX_WARPS, int BLOCKS = 3>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS) SoftmaxKernel(const __grid_constant__ RowParams<float> p) {
  constexpr bool IN_REGISTERS = HOLD == Hold::kRegisters, IN_SHARED = HOLD == Hold::kShared;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ uint64_t barrier, mass_of_row;
  __shared__ int top;
  const int blocks = ptx::ClusterSize(), warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = ptx::ClusterId();
  const SegmentSource source(p.input + row * p.input_stride, p.vocab);
  const int count = source.Count(), first = ptx::ClusterRank() * warps + warp, step = blocks * warps;
  const int slots = (count + step - 1) / step;
  const int mine = first >= count ? 0 : IN_REGISTERS ? 1 : (count - 1 - first) / step + 1;
  const HeldSegments held{reinterpret_cast<float*>(memory) + warp * slots * SEGMENT + lane * 4};
  auto* const sums = reinterpret_cast<SegmentSum*>(memory + (IN_SHARED ? SoftmaxHeldBytes(count, blocks, warps) : 0));
  ptx::ExpectBytes(&barrier, count * sizeof(SegmentSum));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  ptx::GridDependencyWait();
  if constexpr (IN_SHARED) {
#pragma unroll 1
    for (int i = 0; i < mine; ++i) held.Fetch(source, first + i * step, i);
  }
  const float factor = FactorOf(ValueOf(p.temperature, row));
  float x[VECTORS][4];
  const auto read = [&](int i) {
    if constexpr (IN_SHARED) {
      held.Read(i, mine - 1 - i, x);
    } else {
      source.Load<false>(first + i * step, -INFINITY, x);
    }
    // The branch needs registers that only blocks of LONG_WARPS have to spare.
    if (WARPS < LONG_WARPS || factor != 1.f) ForEachColumn(x, [&](float& value) { value *= factor; });
  };
  if (IN_REGISTERS && mine > 0) read(0);
  ptx::ClusterWait();  // every block runs
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    if constexpr (!IN_REGISTERS) read(i);
    const LogitScale scale = ScaleOf(source, factor, x);
    ForEachColumn(x, [&](float& value) { value = scale.Weight(value); });
    if constexpr (IN_SHARED) held.Write(i, x);
    const SegmentSum sum{MassOfSegment<true>(x), scale.exponent, 0};
    if (lane < blocks) sum.Send(sums + first + i * step, lane, &barrier);
  }
  ptx::WaitForBytes(&barrier);
  ptx::LaunchDependents();
  if (warp == 0) {
    uint64_t total;
    const int largest = SumUp<IN_REGISTERS>(sums, count, total);
    if (lane == 0) top = largest, mass_of_row = total;
  }
  __syncthreads();

  const Normaliser normaliser(mass_of_row);
  float* const out = p.out + row * p.out_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    const int segment = first + i * step;
    const int exponent = sums[segment].exponent;
    if constexpr (IN_SHARED) {
      held.Read(i, 0, x);
    } else if constexpr (!IN_REGISTERS) {
      const LogitScale scale = LogitScale::Of(exponent, [&] { return LargestProduct(source, factor); });
      read(i);
      if (scale.IsFar()) ForEachColumn(x, [&](float& value) { value = scale.Brought(value); });
      ForEachColumn(x, [&](float& value) { value = scale.Weight(value); });
    }
    const float unit = PowerOf2(exponent - top), share = unit * normaliser.inverse;
    if (normaliser.IsPeaked()) {
      ForEachColumn(x, [&](float& value) { value = normaliser(value * unit); });
    } else {
      ForEachColumn(x, [&](float& value) { value *= share; });
    }
    StoreSegment(x, out, aligned, segment, source.vocab);
  }
}

}  // namespace sampling

template <>
FLASHINFER_INLINE Status SoftmaxRows<float>(const RowParams<float>& p, Stream stream) {
  using namespace sampling;
  Device device;
  const cudaError_t status = PrepareKernel<SoftmaxKernel<Hold::kShared>>(device);
  if (status != cudaSuccess) return status;
  const int count = int(CeilDiv(p.vocab, SEGMENT));
  constexpr auto* IN_REGISTERS =
      SoftmaxKernel<Hold::kRegisters, HELD_WARPS, 4>;  // 48 registers: five blocks of 8 warps fit an SM
  constexpr auto* LONG_ROWS = SoftmaxKernel<Hold::kRegisters, LONG_WARPS, 2>;
  const int largest = device.has_clusters ? LargestCluster<IN_REGISTERS>(HELD_WARPS * 32, 0) : 1;
  Geometry g{1, 0, true, count * sizeof(SegmentSum)};
  // As few blocks as provide a warp per segment; more while SMs would be idle.
  while (g.cluster < largest && (count > SOFTMAX_WARPS * g.cluster ||
                                 (count > g.cluster && p.rows * g.cluster < 2 * device.multiprocessors))) {
    g.cluster *= 2;
  }
  const int most = int(CeilDiv(count, g.cluster)), warps = std::min(most, SOFTMAX_WARPS);
  g.threads = most * 32;
  if (most <= HELD_WARPS) return LaunchClusters(IN_REGISTERS, g, p.rows, p.enable_pdl, stream, p);
  if (most <= LONG_WARPS && (g.cluster == 1 || g.cluster <= LargestCluster<LONG_ROWS>(LONG_WARPS * 32, 0))) {
    return LaunchClusters(LONG_ROWS, g, p.rows, p.enable_pdl, stream, p);
  }
  g.threads = warps * 32;
  g.cluster = std::min(g.cluster, MAX_CLUSTER);
  const size_t held = SoftmaxHeldBytes(count, g.cluster, warps);
  if (CeilDiv(count, g.cluster) <= SOFTMAX_HELD && int64_t(g.shared_bytes + held) + 64 <= device.shared_bytes) {
    g.shared_bytes += held;
    return LaunchClusters(SoftmaxKernel<Hold::kShared>, g, p.rows, p.enable_pdl, stream, p);
  }
  return LaunchClusters(SoftmaxKernel<Hold::kNothing>, g, p.rows, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
