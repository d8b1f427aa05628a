// SPDX-License-Identifier: Apache-2.0
// Many samples per row from few rows (definitions and parameters: sampling.h). One block per row writes the threshold
// and the masses of segments of 1024 columns to a table; then one warp per output reads the table (1 KB for a
// vocabulary of 128256) and one segment of the row.
// The threshold of top-k and top-p is found exactly, in a bounded number of steps:
//   1. columns are counted in bins of keys, 64 per octave, downwards from the largest;
//   2. the counts bracket the threshold. By count the bracket is one bin. By mass it may be a few: the weight of
//      a column is known to within the edges of its bin, which are 1.6 % apart;
//   3. columns within the bracket are listed, the quanta of those above are summed;
//   4. the threshold is found among the listed columns (FindKey in threshold_search.cuh).
// Steps 1 and 3 iterate over the whole row, step 4 over some hundred columns, or over the row where more are in the
// bracket (for example ties).
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py
#pragma once
#include "row_segments.cuh"
#include "row_slices.cuh"
#include "threshold_search.cuh"

namespace flashinfer {
namespace sampling {

constexpr int BIN_SHIFT = 17;
// Up to this many columns from the top down to the end of the bracket are all listed.
constexpr uint32_t OPEN_COUNT = 1024;

/// Step 2: set `shared.bracket`; visible after the next barrier.
__device__ __forceinline__ void FindBracket(uint32_t top, const RowLimits& wanted, const Scale& scale,
                                            SelectShared& shared) {
  constexpr int MINE = BINS / SELECT_THREADS;  // bins per thread
  const int first = threadIdx.x * MINE;
  // For each bin: columns, and bounds of their quanta.
  const auto edge = [&](int bin) { return (int64_t(top) - (int64_t(bin) << BIN_SHIFT)); };
  const auto quantum = [&](int64_t key) { return key > 0 ? uint64_t(QuantumOf(FromBits(uint32_t(key)), scale)) : 0; };
  const auto least = [&](int bin) { return bin == BINS - 1 ? 0 : quantum(edge(bin + 1) + 1); };
  const auto most = [&](int bin) { return quantum(edge(bin)); };
  uint32_t count[MINE];
  uint64_t sum[3] = {};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    count[i] = shared.histogram[first + i];
    if (count[i] != 0) {
      sum[0] += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
    }
  }
  if (threadIdx.x == 0) shared.first_bin = shared.last_bin = BINS - 1;
  BlockExclusiveScan(sum, shared.scratch);
  uint64_t columns = sum[0];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (count[i] != 0) {
      columns += count[i];
      sum[1] += count[i] * least(first + i);
      sum[2] += count[i] * most(first + i);
      if (columns >= wanted.count || sum[2] >= wanted.quanta) atomicMin(&shared.first_bin, uint32_t(first + i));
      if (columns >= wanted.count || sum[1] >= wanted.quanta) atomicMin(&shared.last_bin, uint32_t(first + i));
    }
  }
  __syncthreads();
  // The owner of the bracket's first bin knows the sums above it, the owner of the last bin the sums within.
  const int from = shared.first_bin, to = shared.last_bin;
  Bracket& bracket = shared.bracket;
  columns = sum[0];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (first + i == from) bracket.count_above = uint32_t(columns);
    columns += count[i];
    if (first + i == to) bracket.is_open = columns <= OPEN_COUNT;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (from == 0) bracket.is_open = 1;
    if (bracket.is_open) bracket.count_above = 0;
    bracket.high = bracket.is_open ? ~uint32_t{0} : uint32_t(edge(from));
    const int64_t low = to == BINS - 1 ? 0 : edge(to + 1) + 1;
    bracket.low = low < 1 ? 1 : uint32_t(low);
  }
}

/// Step 3. Returns true if the bracket contains more columns than the list can hold.
__device__ __forceinline__ bool SetAside(const Slice<false>& row, const Bracket& bracket, const Scale& scale,
                                         SelectShared& shared) {
  const volatile uint32_t& listed = shared.listed;
  uint64_t quanta = 0;
  row.ForEachGroup([&](int, float (&x)[4]) {
    uint32_t within = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = Positive(x[j]);
      const uint32_t key = Bits(x[j]);
      if (key > bracket.high) {
        quanta += QuantumOf(x[j], scale);
      } else if (key >= bracket.low) {
        within |= 1u << j;
      }
    }
    if (within != 0 && listed <= LIST) {  // the list has overflowed already
      uint32_t at = atomicAdd(&shared.listed, uint32_t(__popc(within)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (within >> j & 1) {
          if (at < LIST) shared.list[at] = Bits(x[j]);
          ++at;
        }
      }
    }
  });
  quanta = WarpSum(quanta);
  if (threadIdx.x % 32 == 0) shared.scratch[0][threadIdx.x / 32] = quanta;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < SELECT_THREADS / 32; ++w) quanta += shared.scratch[0][w];
    shared.quanta_above = quanta;
  }
  __syncthreads();
  return listed > LIST;
}

/// Keys in the list.
struct ListedKeys {
  const SelectShared& shared;

  /// Call f(key) for each key within the range.
  template <typename F>
  __device__ __forceinline__ void ForEach(const KeyRange& range, const F& f) const {
    for (int i = threadIdx.x; i < int(shared.listed); i += SELECT_THREADS) {
      const uint32_t key = shared.list[i];
      if (range.Contains(key)) f(key);
    }
  }
};

/// All keys of the row.
struct SliceKeys {
  const Slice<false>& row;

  template <typename F>
  __device__ __forceinline__ void ForEach(const KeyRange& range, const F& f) const {
    row.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (range.Contains(key)) f(key);
      }
    });
  }
};

/// Step 4 over the row, and a second search for top-p after top-k. Not inlined: rarely called.
__device__ __noinline__ uint32_t FindInRow(const Slice<false> row, const Bracket bracket, uint32_t top,
                                           RowLimits wanted, bool top_k_first, float top_p, const Scale scale,
                                           SelectShared& shared) {
  const SliceKeys keys{row};
  KeyThreshold found = FindKey(keys, {bracket.low, bracket.is_open ? top : bracket.high}, bracket.count_above,
                               shared.quanta_above, wanted, scale, shared);
  if (top_k_first) {
    __syncthreads();
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
    found = FindKey(keys, {found.key, top}, 0, 0, wanted, scale, shared);
  }
  return found.key;
}

/// Return the key of the smallest kept column to every thread; `top` is the key of the largest. With `top_k_first`,
/// top_p applies to the columns that top-k keeps instead of the row.
__device__ __forceinline__ uint32_t FindThreshold(const Slice<false>& row, uint32_t top, int emax, RowLimits wanted,
                                                  bool top_k_first, float top_p, SelectShared& shared) {
  const Scale scale(emax);
  uint32_t threshold = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) shared.histogram[i] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    row.ForEachGroup([&](int, float (&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = Bits(Positive(x[j]));
        if (key != 0) atomicAdd(shared.histogram + min((top - key) >> BIN_SHIFT, uint32_t(BINS - 1)), 1u);
      }
    });
    __syncthreads();
    FindBracket(top, wanted, scale, shared);
    __syncthreads();

    const Bracket bracket = shared.bracket;
    if (SetAside(row, bracket, scale, shared)) {
      const bool is_first = top_k_first && pass == 0;
      return max(threshold, FindInRow(row, bracket, top, wanted, is_first, top_p, scale, shared));
    }
    const uint32_t high = bracket.is_open ? max(top, bracket.low) : bracket.high;
    KeyThreshold found{bracket.low, 0};
    const int searches = top_k_first && bracket.is_open && pass == 0 ? 2 : 1;
#pragma unroll 1
    for (int search = 0; search < searches; ++search) {
      if (search == 1) {  // all columns that top-k keeps are in the list
        wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
        __syncthreads();
      }
      found = FindKey(ListedKeys{shared}, {found.key, high}, bracket.count_above, shared.quanta_above, wanted, scale,
                      shared);
    }
    threshold = max(threshold, found.key);
    if (!top_k_first || bracket.is_open || pass == 1) break;
    wanted = {~uint32_t{0}, QuantaLimitOf(top_p, found.kept_quanta)};
    __syncthreads();  // all threads have read the result
  }
  return threshold;
}

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
