// SPDX-License-Identifier: Apache-2.0
// Many samples per row from few rows (definitions and parameters: sampling.h). One block per row writes the threshold
// and the masses of segments of 1024 columns to a table; then one warp per output reads the table (1 KB for a
// vocabulary of 128256) and one segment of the row.
#pragma once
#include "row_segments.cuh"
#include "table_threshold.cuh"

namespace flashinfer {
namespace sampling {

struct TableParams {
  SampleParams sample;
  uint64_t* table;
};

/// True if sampling adds up quanta of columns instead of masses.
__device__ __forceinline__ bool IsByColumn(const SampleParams& p) {
  return p.filter.filter == Filter::kBoth || p.filter.filter == Filter::kTopKFirst;
}

__device__ __forceinline__ Slice<false> WholeRow(const float* row, int vocab) {
  return {nullptr, row, nullptr, 0, vocab, reinterpret_cast<uintptr_t>(row) % 16 == 0};
}

/// Threshold and exponent of a row of probabilities.
struct RowThreshold {
  float threshold;
  int emax;
};

/// Return the maximum over the block.
__device__ __forceinline__ float BlockMax(float x, SelectShared& shared) {
  float* const by_warp = reinterpret_cast<float*>(shared.scratch[0]);
  x = WarpMax(x);
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return WarpMax(by_warp[threadIdx.x % MAX_WARPS]);  // each element is read twice
}

/// Find the threshold of any filter.
__device__ __forceinline__ RowThreshold PrepareRow(const SampleParams& p, int64_t row, const Slice<false>& slice,
                                                   SelectShared& shared) {
  RowThreshold ready{0.f, ONE};
  if (p.filter.filter == Filter::kNone) return ready;
  const float* const input = slice.global;
  float largest = LoadSlice(
      slice, 0.f, [&](int i) { return input[i]; }, [&](int i, float (&x)[4]) { LoadFloats(input + i, x); },
      [](float x) { return x; });
  largest = Positive(BlockMax(largest, shared));
  if (p.filter.filter == Filter::kMinP) {
    return {MinPThreshold(ValueOf(p.filter.top_p, row), largest), BiasedExponent(largest)};
  }
  ready.emax = ExponentOfProbs(largest);
  const Limits limits = LimitsOf(p.filter, row, int(p.vocab), ready.emax);
  if (limits.AnyOf() && largest > 0.f) {
    const uint32_t key =
        FindThreshold(slice, Bits(largest), ready.emax, limits.wanted, limits.top_k_first, limits.top_p, shared);
    ready.threshold = FromBits(key);
  }
  return ready;
}

/// Zero the columns that are not kept; return the mass or quanta of the others.
__device__ __forceinline__ uint64_t KeptMass(float threshold, int emax, bool by_column, float (&x)[4]) {
  const float sum = KeptWeights(threshold, x);
  if (!by_column) return MassOf(sum, emax);
  const Scale scale(emax);
  uint64_t quanta = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) quanta += QuantumOf(x[e], scale);
  return quanta;
}

/// Write the table of a row of logits, whose weights are relative to a power of two per segment: the header holds the
/// exponent that the masses of segments are relative to.
__device__ __forceinline__ void PrepareLogits(const SegmentSource& source, uint64_t* table) {
  __shared__ int32_t exponent;
  if (threadIdx.x == 0) exponent = LEAST_EXPONENT;
  __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    for (int segment = threadIdx.x / 32; segment < source.Count(); segment += blockDim.x / 32) {
      float x[VECTORS][4];
      source.Load<false>(segment, -INFINITY, x);
      const LogitScale scale = ScaleOf(source, 1.f, x);
      if (turn == 0) {
        if (threadIdx.x % 32 == 0) atomicMax(&exponent, scale.exponent);
        continue;
      }
      ForEachColumn(x, [&](float& value) { value = scale.Summand(value); });
      const uint64_t mass = MassOfSegment(x) >> scale.ShiftTo(exponent);
      if (threadIdx.x % 32 == 0) table[TABLE_HEADER + segment] = mass;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) table[0] = 0, table[1] = uint32_t(exponent);
}

/// Write the table of one row per block: header (threshold and emax, or the exponent of logits), then the mass of each
/// segment.
__global__ void __launch_bounds__(SELECT_THREADS, 1) PrepareTableKernel(const __grid_constant__ TableParams t) {
  extern __shared__ __align__(16) unsigned char memory[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(memory);
  const SampleParams& p = t.sample;
  const int64_t row = blockIdx.x;
  const float* const input = p.input + row * p.row_stride;
  uint64_t* const table = t.table + row * TableStride(p.vocab);
  if (p.is_logits) {
    PrepareLogits(SegmentSource(input, p.vocab), table);
    return;
  }
  const Slice<false> slice = WholeRow(input, int(p.vocab));
  const RowThreshold ready = PrepareRow(p, row, slice, shared);
  if (threadIdx.x == 0) table[0] = uint64_t(ready.emax) << 32 | Bits(ready.threshold);
  const int lane = threadIdx.x % 32;
  for (int begin = threadIdx.x / 32 * SEGMENT; begin < slice.size; begin += blockDim.x / 32 * SEGMENT) {
    uint64_t mass = 0;
    for (int i = begin + lane * 4; i < min(begin + SEGMENT, slice.size); i += WARP_COLUMNS) {
      float x[4];
      slice.Read(i, x);
      mass += KeptMass(ready.threshold, ready.emax, IsByColumn(p), x);
    }
    mass = WarpSum(mass);
    if (lane == 0) table[TABLE_HEADER + begin / SEGMENT] = mass;
  }
}

/// Return the segment that holds `target`, or -1 if it is above the total; `before` becomes the mass of the segments
/// before.
__device__ __forceinline__ int FindSegment(const uint64_t* masses, int segments, uint64_t target, uint64_t& before) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < segments; first += 32) {
    const uint64_t mass = first + lane < segments ? masses[first + lane] : 0;
    const uint64_t through = before + WarpInclusiveScan(mass);
    const uint32_t reached = __ballot_sync(0xffffffffu, through >= target);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      before = __shfl_sync(0xffffffffu, through - mass, owner);
      return first + owner;
    }
    before = __shfl_sync(0xffffffffu, through, 31);
  }
  return -1;
}

/// Return the last kept column, searched from the end; -1 without any.
__device__ __forceinline__ int LastKept(const Slice<false>& slice, float threshold) {
  int last = -1;
  for (int base = (slice.size - 1) / WARP_COLUMNS * WARP_COLUMNS; base >= 0 && last < 0; base -= WARP_COLUMNS) {
    const int i = base + threadIdx.x % 32 * 4;
    float x[4] = {};
    if (i < slice.size) slice.Read(i, x);
    if (i < slice.size && KeptWeights(threshold, x) > 0.f) {
      last = i + (x[3] > 0.f ? 3 : x[2] > 0.f ? 2 : x[1] > 0.f ? 1 : 0);
    }
    last = WarpMax(last);
  }
  return last;
}

/// Sample from a segment of logits whose masses are relative to `exponent`; `target` counts from the start of the
/// segment.
__device__ __forceinline__ void DrawFromLogits(const SampleParams& p, int64_t output, const float* input, int segment,
                                               uint64_t target, int exponent) {
  const SegmentSource source(input, int(p.vocab));
  float x[VECTORS][4];
  source.Load<false>(segment, -INFINITY, x);
  const LogitScale scale = ScaleOf(source, 1.f, x);
  const int shift = scale.ShiftTo(exponent);
  uint64_t before = 0;
  for (int j = 0; j < VECTORS; ++j) {
    const int i = SegmentSource::Column(segment, j);
    float four[4];
    source.LoadFour(i, -INFINITY, four);
#pragma unroll
    for (int e = 0; e < 4; ++e) four[e] = Positive(scale.Weight(scale.IsFar() ? scale.Brought(four[e]) : four[e]));
    if (FindInWarp(four, i, target, shift, before, UnitMass, [&](int c) { WriteToken(p, output, c); })) return;
  }
}

/// Sample from a segment of probabilities; `before` is the mass of earlier segments.
__device__ __forceinline__ void DrawFromProbs(const SampleParams& p, int64_t output, const Slice<false>& slice,
                                              int segment, uint64_t target, uint64_t before,
                                              const RowThreshold& ready) {
  const int lane = threadIdx.x % 32, emax = ready.emax;
  for (int base = segment * SEGMENT; base < min(slice.size, (segment + 1) * SEGMENT); base += WARP_COLUMNS) {
    const int i = base + lane * 4;
    float x[4] = {};
    uint64_t mass = 0;
    if (i < slice.size) {
      slice.Read(i, x);
      mass = KeptMass(ready.threshold, emax, IsByColumn(p), x);
    }
    const uint64_t through = before + WarpInclusiveScan(mass);
    const uint32_t reached = __ballot_sync(0xffffffffu, through >= target);
    if (reached != 0) {
      if (lane == __ffs(reached) - 1) {
        target -= through - mass;
        WriteToken(p, output, i + (IsByColumn(p) ? ColumnOfQuanta(x, target, Scale(emax)) : ColumnOf(x, target, emax)));
      }
      return;
    }
    before = __shfl_sync(0xffffffffu, through, 31);
  }
}

/// Sample one output per warp.
__global__ void __launch_bounds__(256) DrawKernel(const __grid_constant__ TableParams t) {
  const SampleParams& p = t.sample;
  const int lane = threadIdx.x % 32;
  const int64_t output = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (output >= p.batch) return;
  const int64_t row = InputRow(p, output);
  const float* const input = p.input + row * p.row_stride;
  const uint64_t* const table = t.table + row * TableStride(p.vocab);
  const int segments = int(TableStride(p.vocab)) - TABLE_HEADER, vocab = int(p.vocab);
  const RowThreshold ready{FromBits(uint32_t(table[0])), int(table[0] >> 32)};
  const Slice<false> slice = WholeRow(input, vocab);

  uint64_t total = MASS_OF_ONE;
  if (p.filter.filter != Filter::kNone || p.is_logits) {
    total = 0;
    for (int s = lane; s < segments; s += 32) total += table[TABLE_HEADER + s];
    total = WarpSum(total);
  }
  const uint64_t random = RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
  const uint64_t target = TargetOf(random, total);
  uint64_t before = 0;
  const int segment = FindSegment(table + TABLE_HEADER, segments, target, before);
  if (segment < 0) {  // rounding left the target above the total
    const int last = LastKept(slice, ready.threshold);
    if (lane == 0) WriteToken(p, output, last);
  } else if (p.is_logits) {
    DrawFromLogits(p, output, input, segment, target - before, int(table[1]));
  } else {
    DrawFromProbs(p, output, slice, segment, target, before, ready);
  }
}

}  // namespace sampling

FLASHINFER_INLINE Status SampleByTable(const SampleParams& p, uint64_t* table, Stream stream) {
  using namespace sampling;
  const TableParams t{p, table};
  const int64_t blocks = CeilDiv(p.batch, 8);
  if (blocks > INT32_MAX || p.rows > INT32_MAX) return cudaErrorInvalidValue;
  const Geometry prepare{1, SELECT_THREADS, false, sizeof(SelectShared)};
  const Status status = LaunchClusters(PrepareTableKernel, prepare, p.rows, false, stream, t);
  if (status != cudaSuccess) return status;
  return LaunchClusters(DrawKernel, {1, 256, false, 0}, blocks, false, stream, t);
}

}  // namespace flashinfer
