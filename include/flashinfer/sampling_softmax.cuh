// SPDX-License-Identifier: Apache-2.0
// Softmax (definition and parameters: sampling.h). A cluster works on a row: each warp holds the weights of its
// segments in shared memory (HELD; otherwise segments are read twice), tells all blocks their sums, and writes them
// divided by the total. Three blocks on an SM: one loads while others compute and store.
#pragma once
#include "ptx/cp_async.cuh"
#include "sampling.cuh"
#include "sampling_segment.cuh"

namespace flashinfer {
namespace sampling {

constexpr int SOFTMAX_WARPS = 8;      // of a block, at most
constexpr int SOFTMAX_SEGMENTS = 16;  // of a block, so that three blocks share an SM
constexpr int SOFTMAX_HELD = 24;      // at most: two blocks

/// Where a warp holds segments. Lanes hold and read what they have loaded.
struct HeldSegments {
  float* first;  // of this lane

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

  /// A slot after which `more` have been fetched.
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

/// Bytes of shared memory of a block: what it holds, then what it is told.
template <bool HELD>
FLASHINFER_HD size_t SoftmaxHeldBytes(int count, int blocks, int warps) {
  return HELD ? size_t((count + blocks * warps - 1) / (blocks * warps)) * warps * SEGMENT * sizeof(float) : 0;
}

template <bool HELD>
__global__ void __launch_bounds__(SOFTMAX_WARPS * 32, 3) SoftmaxKernel(const __grid_constant__ RowParams<float> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ uint64_t barrier, mass_of_row;
  __shared__ float top;
  const int blocks = ptx::ClusterSize(), warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = ptx::ClusterId();
  const SegmentSource source(p.input + row * p.input_stride, p.vocab);
  const int count = source.Count(), first = ptx::ClusterRank() * warps + warp, step = blocks * warps;
  const int slots = (count + step - 1) / step, mine = first < count ? (count - 1 - first) / step + 1 : 0;
  const HeldSegments held{reinterpret_cast<float*>(memory) + warp * slots * SEGMENT + lane * 4};
  auto* const sums = reinterpret_cast<SegmentSum*>(memory + SoftmaxHeldBytes<HELD>(count, blocks, warps));
  if (threadIdx.x == 0) ptx::ExpectBytes(&barrier, count * sizeof(SegmentSum));
  __syncwarp();
  ptx::ClusterArriveRelaxed();
  ptx::GridDependencyWait();
  if constexpr (HELD) {
#pragma unroll 1
    for (int i = 0; i < mine; ++i) held.Fetch(source, first + i * step, i);
  }
  const float factor = FactorOf(ValueOf(p.temperature, row));
  float x[VECTORS][4];
  const auto read = [&](int i) {
    if constexpr (HELD) {
      held.Read(i, mine - 1 - i, x);
    } else {
      source.Load<false>(first + i * step, -INFINITY, x);
    }
    ForEachColumn(x, [&](float& value) { value *= factor; });
  };
  ptx::ClusterWait();  // every block runs
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    read(i);
    const LogitScale scale = ScaleOf(x);
    ForEachColumn(x, [&](float& value) { value = scale.Weight(value); });
    if constexpr (HELD) held.Write(i, x);
    ForEachColumn(x, [](float& value) { value = Positive(value); });
    const SegmentSum sum{MassOfSegment(x), scale.exponent, 0};
    if (lane < blocks) sum.Send(sums + first + i * step, lane, &barrier);
  }
  ptx::WaitForBytes(&barrier);
  ptx::LaunchDependents();
  if (warp == 0) {
    float largest = -INFINITY;
#pragma unroll 4
    for (int s = lane; s < count; s += 32) largest = fmaxf(largest, sums[s].exponent);
    largest = WarpLargest(largest);
    uint64_t total = 0;
#pragma unroll 4
    for (int s = lane; s < count; s += 32) total += sums[s].mass >> sums[s].ShiftTo(largest);
    total = WarpSum(total);
    if (lane == 0) top = largest, mass_of_row = total;
  }
  __syncthreads();

  const Normaliser normaliser(mass_of_row);
  float* const out = p.out + row * p.out_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    const int segment = first + i * step;
    const LogitScale scale(sums[segment].exponent);
    if constexpr (HELD) {
      held.Read(i, 0, x);
    } else {
      read(i);
      ForEachColumn(x, [&](float& value) { value = scale.Weight(LimitLogit(value)); });
    }
    const float unit = PowerOf2(int(scale.exponent - top)), share = unit * normaliser.inverse;
    if (normaliser.IsPeaked()) {
      ForEachColumn(x, [&](float& value) { value = normaliser(value * unit); });
    } else {
      ForEachColumn(x, [&](float& value) { value *= share; });
    }
    const bool is_whole = aligned && (segment + 1) * SEGMENT <= source.vocab;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int column = SegmentSource::Column(segment, j);
      if (is_whole) {
        RoundTo<float, 4>(x[j]).Store(out + column);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < source.vocab) out[column + e] = x[j][e];
        }
      }
    }
  }
}

}  // namespace sampling

template <>
FLASHINFER_INLINE Status SoftmaxRows<float>(const RowParams<float>& p, Stream stream) {
  using namespace sampling;
  cudaError_t status;
  const Device& device = Device::Current(status);
  if (status != cudaSuccess) return status;
  bool has_cluster_code = false;
  status = PrepareKernel<SoftmaxKernel<true>>(device, has_cluster_code);
  if (status != cudaSuccess) return status;
  const int count = int(CeilDiv(p.vocab, SEGMENT));
  Geometry g{1, 0, true, 0};
  // As few blocks as leave room for others; more while SMs would idle.
  while (has_cluster_code && g.cluster < MAX_CLUSTER &&
         (count > SOFTMAX_SEGMENTS * g.cluster ||
          (count > g.cluster && p.rows * g.cluster < 2 * device.multiprocessors))) {
    g.cluster *= 2;
  }
  const int most = int(CeilDiv(count, g.cluster)), warps = std::min(most, SOFTMAX_WARPS);
  g.threads = warps * 32;
  g.shared_bytes = SoftmaxHeldBytes<true>(count, g.cluster, warps) + count * sizeof(SegmentSum);
  if (most <= SOFTMAX_HELD && int64_t(g.shared_bytes) + 64 <= device.shared_bytes) {
    return LaunchClusters(SoftmaxKernel<true>, g, p.rows, p.enable_pdl, stream, p);
  }
  g.shared_bytes = count * sizeof(SegmentSum);
  return LaunchClusters(SoftmaxKernel<false>, g, p.rows, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
